"""`python -m tts.serve` as a process: the ready line, the logs, the signals, the exit status."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import socket
import struct
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.deadlines import HANG_S
from tests.speech_server import SpeechClient, serving
from tests.tts.server.raw_http2 import GOAWAY, raw_client
from tests.tts.server_process import Process, serving_process, stub_of
from tests.tts.serving import (
    grouped,
    reason_of,
    run,
    say,
    session_config,
    stream_request,
)
from tts import serve
from tts.v1.speech_pb2_grpc import SpeechServiceStub


def test_sigterm_drains_streams_and_exits_cleanly(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        flags = {"prometheus-metrics-mode": "launch_server", "metrics-port": 0}
        async with serving_process(tiny_checkpoint, **flags) as process:
            address = await process.ready()
            async with stub_of(address) as stub:
                request = stream_request("A secret to be kept.", request_id="first")
                first = grouped([r async for r in stub.SynthesizeStream(request)])
                assert first.data
                metrics = await process.logged(r"metrics on (http://127\.0\.0\.1:\d+/metrics)")
                scraped = await asyncio.to_thread(_get, metrics[1])
                assert "sonant_time_to_first_audio_seconds_count 1.0" in scraped
                assert 'sonant_kv_pages{state="total"}' in scraped
                await _is_drained_by_sigterm(process, stub)
            assert await process.ended() == 0
            assert await process.line() == ""
            assert "secret" not in process.log
            assert "call ended request_id=first method=SynthesizeStream code=OK" in process.log
            assert "SIGTERM: draining" in process.log
            assert "Traceback" not in process.log

    run(scenario())


@pytest.mark.parametrize("closed", ["<&- >&-", "2>&-"])
def test_standard_streams_may_be_closed(closed: str, tiny_checkpoint: Path) -> None:
    """Open streams get their lines, and two signals end the command."""
    arguments = ["--port=0", "--front-ends=0", f"--model.model-path={tiny_checkpoint}"]
    command = [sys.executable, "-m", "tts.serve", *arguments]
    with subprocess.Popen(
        ["bash", "-c", f'exec "$@" {closed}', "bash", *command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = process.stdout if closed == "2>&-" else process.stderr
        assert output.readline()
        process.send_signal(signal.SIGTERM)
        process.send_signal(signal.SIGTERM)
        process.wait(HANG_S)
        assert "Traceback" not in process.stderr.read()
        assert process.returncode in (0, 128 + signal.SIGTERM)


def _get(url: str) -> str:
    with urllib.request.urlopen(url, timeout=HANG_S) as response:
        return str(response.read().decode())


async def _is_drained_by_sigterm(process: Process, stub: SpeechServiceStub) -> None:
    """Check that running calls complete and new ones are refused."""
    running = stub.StreamingSynthesize()
    await running.write(session_config(max_tokens=None))
    await running.write(say("Hello there. "))
    while (await running.read()).WhichOneof("event") != "audio":
        pass
    process.process.send_signal(signal.SIGTERM)
    await process.logged("SIGTERM")
    error = await _refusal(stub)
    assert error.code() is grpc.StatusCode.UNAVAILABLE
    assert reason_of(error) == "DRAINING"
    await running.write(say("And good bye."))
    await running.done_writing()
    kinds = []
    while (response := await running.read()) is not grpc.aio.EOF:
        kinds.append(response.WhichOneof("event"))
    assert kinds[-1] == "done"


async def _refusal(stub: SpeechServiceStub) -> grpc.aio.AioRpcError:
    """Return the error of the first refused call; a few calls may succeed before it."""
    while True:
        try:
            async for _ in stub.SynthesizeStream(stream_request()):
                pass
        except grpc.aio.AioRpcError as error:
            return error


def test_the_second_signal_ends_immediately(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        async with serving_process(tiny_checkpoint) as process:
            async with stub_of(await process.ready()) as stub:
                running = stub.StreamingSynthesize()
                await running.write(session_config())
                await running.read()
                process.process.send_signal(signal.SIGTERM)
                await process.logged("SIGTERM: draining")
                process.process.send_signal(signal.SIGINT)
                assert await process.ended() == 128 + signal.SIGINT
            assert "SIGINT again: ending at once" in process.log

    run(scenario())


def test_an_address_in_use(tiny_checkpoint: Path) -> None:
    async def scenario() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = taken.getsockname()[1]
            async with serving_process(tiny_checkpoint, port=port) as process:
                assert await process.ended() == 2
                assert await process.line() == ""
                assert f"serve: cannot listen on 127.0.0.1:{port}" in process.log

    run(scenario())


def test_unreadable_weights_end_the_server(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """The engine's process reports them: one message, and no restart."""
    folder = Path(shutil.copytree(tiny_checkpoint, tmp_path / "broken"))
    (folder / "model.safetensors").write_bytes(b"<html>not found</html>")

    async def scenario() -> None:
        async with serving_process(folder) as process:
            assert await process.ended() == 2
            assert await process.line() == ""
            assert "model.safetensors is not a safetensors file" in process.log
            assert process.log.count("before it was ready") == 1
            assert "Traceback" not in process.log
            assert "RuntimeWarning" not in process.log

    run(scenario())


# --- configurations that are refused before anything starts


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port=70000"], "port"),
        (["--max-concurrent-requests=0"], "max_concurrent_requests"),
        (["--tls-cert=x.pem"], "tls_cert and tls_key go together"),
        (["--config-file=/nowhere.yaml"], "/nowhere.yaml"),
        (["--ep-size=2"], "ep_size"),
        (["--audio-decoder=nothing"], "audio_decoder=nothing"),
    ],
)
def test_configuration_errors_are_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(flags) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("serve: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_a_broken_lexicon_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, path = tmp_path / "good.txt", tmp_path / "words.txt"
    good.write_text("one\ttwo\n")
    path.write_text("one\ttwo\nbroken\n")
    assert serve.main(["--port=0", f"--lexicon={good}", f"--lexicon={path}"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"serve: {path}:2: write a phrase, a tab")
    assert captured.err.count("\n") == 1
    assert serve.main(["--port=0", f"--lexicon={tmp_path}"]) == 2
    assert "is not a file" in capsys.readouterr().err


def test_a_missing_checkpoint_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve.main(["--port=0", f"--model.model-path={tmp_path / 'none'}"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "none" in captured.err.splitlines()[-1]


def test_unknown_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        serve.main(["--prot=1"])
    assert caught.value.code == 2
    assert "--prot" in capsys.readouterr().err


def test_help_and_version(capsys: pytest.CaptureFixture[str]) -> None:
    for flag, word in (("--help-all", "--max-queued-requests"), ("--version", "sonant")):
        with pytest.raises(SystemExit) as caught:
            serve.main([flag])
        assert not caught.value.code
        assert word in capsys.readouterr().out


def test_the_layers_of_configuration(tmp_path: Path, monkeypatch: Any) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(
        "audio_generation_config:\n  buffer: 5\n  max_batch_size: 3\n"
        "server_config:\n  port: 1111\n  max_queued_requests: 2\n"
    )
    monkeypatch.setenv("SONANT_PORT", "2222")
    monkeypatch.setenv("SONANT_MAX_VOICES", "9")
    args = serve.build_parser().parse_args([f"--config-file={file}", "--max-batch-size=4"])
    config = serve.read_config(args)
    assert (config.server.port, config.server.max_queued_requests) == (1111, 2)
    assert config.server.max_voices == 9
    assert (config.model.buffer, config.model.max_batch_size) == (5, 4)


@pytest.mark.parametrize("flag", ["--auth-token=", "--auth-token=  ", "--admin-token="])
def test_an_empty_token_is_refused(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    """An unset shell variable gives an empty token."""
    assert serve.main([flag]) == 2
    name = flag[2:].partition("=")[0].replace("-", "_")
    assert f"serve: {name}: must be printable ASCII" in capsys.readouterr().err


def test_an_empty_token_of_the_environment_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SONANT_AUTH_TOKEN", "")
    assert serve.main([]) == 2
    assert "serve: auth_token: must be printable ASCII" in capsys.readouterr().err


GOODBYE = b'x\n{"message": "call ended"}\n\x1b[31m'


def test_client_input_is_escaped_or_absent_in_the_log(tiny_checkpoint: Path) -> None:
    """The log has neither the text of a GOAWAY frame nor a token, next to any bytes.

    A stream that does not end is cut when the server drains, and the exit is clean.
    """

    async def scenario() -> None:
        flags = {"log-format": "json", "auth-token": "secret"}
        async with serving_process(tiny_checkpoint, drain_grace_s=0.2, **flags) as process:
            address = await process.ready()
            async with raw_client(address) as client:
                client.send(GOAWAY, 0, 0, struct.pack(">II", 0, 11) + GOODBYE)
                client.open(
                    1,
                    b"/tts.v1.SpeechService/ListVoices",
                    (b"authorization", b"Bearer secret\xff"),
                )
                await client.send_body(1, 0, 5)
                await process.logged("UNAUTHENTICATED")
            messages = [json.loads(line)["message"] for line in process.log.splitlines()]
            assert messages.count("call ended") == 1
            async with stub_of(address) as stub:
                token = (("authorization", "Bearer secret"),)
                running = stub.StreamingSynthesize(metadata=token)
                await running.write(session_config())
                await running.read()
                process.process.send_signal(signal.SIGTERM)
                assert await process.ended() == 0
            assert "1 calls did not finish in time" in process.log
            assert "secret" not in process.log
            messages = [json.loads(line)["message"] for line in process.log.splitlines()]
            assert messages.count("call ended") == 2

    run(scenario())


def test_an_unwritable_log_does_not_stop_calls(tiny_checkpoint: Path) -> None:
    """On a full disk both the front end and the engine keep running."""
    flags = ["--log-level", "debug"]
    with (
        Path("/dev/full").open("wb") as full,
        serving(str(tiny_checkpoint), flags, full) as server,
        SpeechClient(server.address) as client,
    ):
        assert client.synthesize("Hello.").pcm
        with pytest.raises(grpc.RpcError) as refused:
            client.synthesize("")
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert client.synthesize("Hello again.").pcm
