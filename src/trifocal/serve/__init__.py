"""An HTTP server of one model, with the interface of OpenAI's completions."""
