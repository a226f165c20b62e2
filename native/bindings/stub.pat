# Types of fields that are plain getters, for the stub of the module.

_native.OpResult.status$:
    @property
    def status(self) -> int: ...

_native.OpResult.reason$:
    @property
    def reason(self) -> bytes: ...

_native.OpResult.epoch$:
    @property
    def epoch(self) -> int: ...

_native.OpResult.contributors$:
    @property
    def contributors(self) -> tuple[int, ...]: ...

_native.OpResult.registrations$:
    @property
    def registrations(self) -> int: ...

_native.OpResult.sent_bytes$:
    @property
    def sent_bytes(self) -> int: ...

_native.OpResult.received_bytes$:
    @property
    def received_bytes(self) -> int: ...
