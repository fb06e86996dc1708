"""The demo, and the local servers that it and the tests run on."""
