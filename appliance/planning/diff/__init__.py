"""What changes for a service, its memory and its clients when one manifest takes another's place."""
