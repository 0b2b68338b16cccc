"""gRPC health service with all methods; the servicer of grpcio-health-checking lacks `List`."""

from __future__ import annotations

from collections.abc import Iterable

import grpc
from grpc_health.v1 import health, health_pb2


class HealthServicer(health.aio.HealthServicer):
    """Health servicer with `List`; every listed service must have been `set` once."""

    def __init__(self, services: Iterable[str]) -> None:
        super().__init__()
        self._services = tuple(services)

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        """Return the status of every service by name; "" is the whole server."""
        statuses = {
            name: await self.Check(health_pb2.HealthCheckRequest(service=name), context)
            for name in self._services
        }
        return health_pb2.HealthListResponse(statuses=statuses)
