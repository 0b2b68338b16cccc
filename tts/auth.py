"""Bearer tokens: who may call, and who may change the voices."""

from __future__ import annotations

import hmac
from dataclasses import dataclass

import grpc

from tts.errors import ForbiddenError, UnauthenticatedError

ADMIN_METHODS = frozenset(
    {"/tts.v1.SpeechService/CreateVoice", "/tts.v1.SpeechService/DeleteVoice"}
)


@dataclass(frozen=True, slots=True)
class Tokens:
    """The tokens a server accepts, if any. Without `admin`, the user token may do everything."""

    user: str | None = None
    admin: str | None = None

    def __bool__(self) -> bool:
        return self.user is not None or self.admin is not None

    def check(self, method: str, presented: str | None) -> None:
        """Raise unless the presented bearer token may call the method ("/package.Service/Name").

        Compares in constant time, always against both tokens.
        """
        is_user, is_admin = (_matches(presented, token) for token in (self.user, self.admin))
        if not (is_user or is_admin):
            raise UnauthenticatedError("send 'authorization: Bearer TOKEN' with a valid token")
        if method in ADMIN_METHODS and self.admin and not is_admin:
            raise ForbiddenError("changing voices needs the admin token")


def _matches(presented: str | None, token: str | None) -> bool:
    return token is not None and hmac.compare_digest((presented or "").encode(), token.encode())


def bearer_token(details: grpc.HandlerCallDetails) -> str | None:
    """The bearer token in a call's metadata."""
    for key, value in details.invocation_metadata or ():
        if key == "authorization" and isinstance(value, str):
            scheme, _, token = value.partition(" ")
            return token.strip() if scheme.lower() == "bearer" else None
    return None
