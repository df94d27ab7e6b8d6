"""Routing of requests to engines: admission, resuming after crashes, quarantine, request timelines."""
