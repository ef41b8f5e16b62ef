"""What requests look like, for the OpenAPI document and for the first check of types."""
