"""Tests of the HTTP interface, the launcher and the demo model."""
