"""Sockets, files and process functions that the supervisor and the server share."""
