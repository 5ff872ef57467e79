"""The Ray Serve application, its HTTP interface, launcher and machine checks; the demo model."""
