"""The APIs that the server speaks."""
