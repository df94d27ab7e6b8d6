"""Bundles: one archive with manifest, weights, lock and bill of materials, for machines without a network."""
