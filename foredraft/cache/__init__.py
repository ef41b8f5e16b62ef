"""Where keys and values of committed tokens live."""
