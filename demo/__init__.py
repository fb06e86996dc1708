"""The demo, and the local servers that the demo and the tests use."""
