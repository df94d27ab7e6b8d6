"""Speech recognition: transcriptions and translations of audio files (docs/speech.md)."""
