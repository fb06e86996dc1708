"""The pictures of the documentation: ``python -m tests.pictures`` takes them all anew."""
