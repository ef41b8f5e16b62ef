"""An HTTP server in the dialects of OpenAI and Anthropic (`foredraft serve`)."""
