"""Transfer ids: one fresh and unguessable for every dispatch, since it opens a prompt's KV."""

import secrets

from kvflow.ids import TransferId

_RANDOM_BYTES = 16


def new_transfer_id() -> TransferId:
    return TransferId(f"route-{secrets.token_hex(_RANDOM_BYTES)}")
