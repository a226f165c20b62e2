"""A source of pages for a dashboard's server that has one run, which goes on when its owner lets it."""

from ringfold.observe.dashboard.channels import RunChannel
from ringfold.observe.dashboard.live import LiveSession
from ringfold.observe.dashboard.server import PageSocket
from ringfold.observe.view import RunView


class MadeUpSource:
    """The view of any run, as live runs are served."""

    def __init__(self, view: RunView) -> None:
        self.view, self._channel = view, RunChannel(view)

    def open(self, page: PageSocket) -> LiveSession:
        return LiveSession(self, page)

    def channel(self, name: str) -> RunChannel:
        return self._channel

    def publish(self) -> None:
        """Make a new state for all pages."""
        self._channel.publish()
