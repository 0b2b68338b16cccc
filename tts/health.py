"""`python -m tts.health`: ask a server for its health, for container engines and scripts.

Exit status: 0 serving, 1 not serving or no answer, 2 wrong request.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from contextlib import closing

from tts.cli.console import prepare_streams, print_error, print_line
from tts.cli.options import Credentials, UsageError, read_credentials
from tts.cli.parser import HelpFormatter, OptionGroup, add_information, add_tls_options
from tts.cli.program import run_program

NAME = "health"
PROGRAM = "python -m tts.health"
ADDRESS = "localhost:50051"
TIMEOUT_S = 5.0


def build_parser(*, program: str = PROGRAM) -> argparse.ArgumentParser:
    """Create the command line."""
    parser = argparse.ArgumentParser(
        prog=program,
        usage="%(prog)s [options]",
        allow_abbrev=False,
        add_help=False,
        formatter_class=HelpFormatter,
        description="Ask a server for its health, which needs no token.",
        epilog="Exit status: 0 serving, 1 not serving or no answer, 2 wrong request.",
    )
    connection = parser.add_argument_group("connection")
    connection.add_argument(
        "--server",
        default=ADDRESS,
        metavar="HOST:PORT",
        help=f"server to ask (default: {ADDRESS})",
    )
    add_tls_options(OptionGroup(connection))
    add_information(parser, lambda: build_parser(program=program))
    return parser


def check(address: str, credentials: Credentials) -> str:
    """Return the server's status, such as SERVING. Raises `grpc.RpcError` without an answer."""
    import grpc
    from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
    from grpc_health.v1.health_pb2_grpc import HealthStub

    if credentials.use_tls:
        tls = grpc.ssl_channel_credentials(
            credentials.root_certificates, credentials.private_key, credentials.certificate
        )
        channel = grpc.secure_channel(address, tls)
    else:
        channel = grpc.insecure_channel(address)
    with closing(channel):
        answer = HealthStub(channel).Check(HealthCheckRequest(), timeout=TIMEOUT_S)
    return str(HealthCheckResponse.ServingStatus.Name(answer.status))


def main(argv: Sequence[str] | None = None, program: str = PROGRAM) -> int:
    """Run the command and return its exit status. `program`: its name in the help."""
    prepare_streams()
    args = build_parser(program=program).parse_args(argv)
    from grpc import RpcError

    try:
        status = check(args.server, read_credentials(args))
    except UsageError as error:
        print_error(f"{NAME}: {error}")
        return 2
    except RpcError as error:
        print_error(f"{NAME}: {args.server}: {' '.join(str(error.details()).split())}")
        return 1
    print_line(f"{args.server}: {status}")
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    run_program(main)
