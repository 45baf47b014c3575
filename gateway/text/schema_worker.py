"""`python -m gateway.text.schema_worker`: compiles clients' JSON schemas, so that one without end ends a process nobody needs.

A line in is a JSON array: directory of the tokenizer, its end-of-answer ids, the schema. Lines out: an empty one when the
tokenizer is at hand, then why answers cannot be held to the schema, as a JSON string; empty: they can.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

from gateway.api.json_grammar import GrammarTokenizer, grammar_tokenizer, matcher

MOST_BYTES = 1 << 30  # of memory, beyond what it has when it starts
_KEPT = 4  # tokenizers


def main() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most = pages * resource.getpagesize() + MOST_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    tokenizers: dict[str, GrammarTokenizer] = {}
    for line in sys.stdin:
        directory, eos_ids, schema = json.loads(line)
        key = json.dumps([directory, eos_ids])
        if key not in tokenizers:
            if len(tokenizers) == _KEPT:
                del tokenizers[next(iter(tokenizers))]
            tokenizers[key] = grammar_tokenizer(Path(directory), eos_ids)
        print(flush=True)
        try:
            matcher(tokenizers[key], schema)
            wrong = ""
        except ValueError as error:
            wrong = str(error) or "it is not a schema"
        print(json.dumps(wrong), flush=True)


if __name__ == "__main__":
    main()
