"""Parquet files that anyone may have written, as tables that are whole.

Owns the reading and what is refused: bytes that are no Parquet file, text that is not UTF-8, and a small file that
stands for a huge table. A run of equal values takes a few bytes whatever its length, but a list of samples has a
different name in each row, and those take at least a bit.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from pyarrow import parquet

_ROWS_PER_BYTE = 8
_TIMES = 64  # of the file's bytes: what a table may take in memory
_SPARE_BYTES = 64 << 20
_BATCH_ROWS = 4096


def parquet_names(data: Any) -> list[str]:
    """The columns of the table in these bytes. ValueError says in a line what is wrong with them."""
    try:
        return list(parquet.ParquetFile(pa.py_buffer(data)).schema_arrow.names)
    except UnicodeDecodeError:
        raise ValueError("the name of a column is not text in UTF-8") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0][:300]) from None


def read_parquet(data: Any) -> pa.Table:
    """The table in these bytes. ValueError says in a line what is wrong with them."""
    size = memoryview(data).nbytes
    try:
        file = parquet.ParquetFile(pa.py_buffer(data))
        if file.metadata.num_rows > _ROWS_PER_BYTE * size:
            raise ValueError(f"{size:,} bytes say that they hold {file.metadata.num_rows:,} rows")
        batches, total = [], 0
        for batch in file.iter_batches(_BATCH_ROWS, use_threads=False):
            batches.append(batch)
            total += batch.nbytes
            if total > _SPARE_BYTES + _TIMES * size:
                raise ValueError(f"{size:,} bytes become more than {total:,} in memory")
        table = pa.Table.from_batches(batches, schema=file.schema_arrow)
        table.validate(full=True)
        _ = table.column_names  # text, or an error
    except UnicodeDecodeError:
        raise ValueError("the name of a column is not text in UTF-8") from None
    except (pa.ArrowException, OSError) as error:
        raise ValueError((str(error).splitlines() or [type(error).__name__])[0][:300]) from None
    return table
