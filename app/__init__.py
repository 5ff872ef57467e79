"""The Ray Serve application, its HTTP interface and launcher, and the embedded demo model."""
