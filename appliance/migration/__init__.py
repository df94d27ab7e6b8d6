"""Conversion of another server's command line or file to a manifest: one table for each server (docs/migration.md)."""
