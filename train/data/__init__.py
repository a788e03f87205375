"""Rows of text or ids -> tokens and masks -> packed batches in a fixed order."""

from train.data.cache import cached_documents
from train.data.packing import PackedData, Piece, first_fit, pack
from train.data.read_ahead import read_ahead
from train.data.rows import Counts, RowReader, read_documents
from train.data.store import Document, TokenStore, frequent_tokens
from train.data.turns import ChatOptions

__all__ = [
    "ChatOptions",
    "Counts",
    "Document",
    "PackedData",
    "Piece",
    "RowReader",
    "TokenStore",
    "cached_documents",
    "first_fit",
    "frequent_tokens",
    "pack",
    "read_ahead",
    "read_documents",
]
