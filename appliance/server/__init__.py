"""The gateway process: its configuration, the router to the engines, admission."""
