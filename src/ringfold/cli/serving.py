"""What commands share that serve pages over HTTP beside their work."""

import logging
from collections.abc import Sequence

from ringfold.config import Resolved
from ringfold.errors import ConfigError
from ringfold.runtime.http_server import Pages, PageServer
from ringfold.wire.proof import viewer_token


def serve_pages(pages: Pages, listen: Sequence[str], resolved: Resolved, default_port: int) -> PageServer:
    """Serve the pages until `stop`, in a thread. ConfigError if an address cannot be used."""
    token = resolved.token()
    try:
        server = PageServer(
            pages,
            listen,
            secret=token,
            viewer=viewer_token(token),
            insecure=resolved.switch("insecure"),
            default_port=default_port,
        )
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot serve metrics at {', '.join(listen)}: {why}") from error
    where = ", ".join(f"http://{address}{path}" for address in server.addresses for path in pages)
    logging.getLogger(__name__).info("metrics at %s", where)
    return server
