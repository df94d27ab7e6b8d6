"""Formats of audio files by their first bytes."""

from engine.media.processed import MediaError

NAMES = {
    **{"wav": "WAV", "mp3": "MP3", "flac": "FLAC", "ogg": "Ogg", "opus": "Ogg", "m4a": "MP4", "mp4": "MP4"},
    **{"aac": "MP4", "webm": "WebM"},
}
"""Container by the `format` of a request."""


def container_of(data: bytes) -> str:
    """Return the container of an audio file, or "" for an unknown one."""
    if data[:4] in (b"RIFF", b"RF64") and data[8:12] == b"WAVE":
        return "WAV"
    if data[:3] == b"ID3" or (len(data) > 1 and data[0] == 0xFF and data[1] & 0xE0 == 0xE0):
        return "MP3"
    if data[4:8] == b"ftyp":
        return "MP4"
    return {b"fLaC": "FLAC", b"OggS": "Ogg", b"\x1a\x45\xdf\xa3": "WebM"}.get(data[:4], "")


def check_format(data: bytes, name: str) -> None:
    """Raise MediaError if a file has another format than the request says. An unknown file is refused when it is
    decoded."""
    if not name:
        return
    wanted = NAMES.get(name.lower())
    if wanted is None:
        raise MediaError(f"format {name[:40]!r} is not supported; known: {', '.join(NAMES)}")
    found = container_of(data)
    if found and found != wanted:
        raise MediaError(f"format is {name!r}, but the file is {found}; correct the format, or leave the part out")
