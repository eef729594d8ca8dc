"""`python -m headwater.node URL [THREADS [CACHE_BYTES [MEMORY_BYTES [far [TABLES]]]]]`: how a trainer starts its
embedded node.

People use `headwater serve`.
"""

import json
import os
import sys
from pathlib import Path

from headwater.data.secrets import keep_out_of_logs
from headwater.errors import HeadwaterError
from headwater.node.serve import serve_embedded

if __name__ == "__main__":
    code = 0
    keep_out_of_logs()
    try:
        given = [*sys.argv[2:], "", "", "", "", ""]
        threads, cache_bytes, memory_bytes = (int(each) if each else None for each in given[:3])
        serve_embedded(sys.argv[1], threads, cache_bytes, memory_bytes, is_far=given[3] == "far",
                       tables=Path(given[4]) if given[4] else None)  # fmt: skip
    except HeadwaterError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        code = 1
    os._exit(code)  # gRPC threads that still hold a dead stream must not keep the process
