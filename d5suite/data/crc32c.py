"""The checksum of TFRecord files, a masked CRC-32C: the standard library has only the other CRC-32.

https://www.tensorflow.org/tutorials/load_data/tfrecord#tfrecords_format_details defines it. Imports google_crc32c.
"""

from __future__ import annotations

import struct

import google_crc32c


def masked_crc32c(data: bytes) -> int:
    """The CRC-32C (Castagnoli) as TFRecord files store it: rotated by 15 bits, plus a constant."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def masked_crc32c_bytes(data: bytes) -> bytes:
    """`masked_crc32c` as the four bytes in the file."""
    return struct.pack("<I", masked_crc32c(data))
