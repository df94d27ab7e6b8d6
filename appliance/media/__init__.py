"""Images, videos and audio of requests: fetching, decoding and processing for the model, with limits."""
