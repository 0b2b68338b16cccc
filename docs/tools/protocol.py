"""The protocol reference: Markdown from the comments of proto/tts/v1.

.proto ─ grpc_tools.protoc ─▶ descriptors with source locations ─▶ a section per file, a table
                                                                   per message, enum and service
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

PROTO = Path(__file__).parents[2] / "proto"
ORDER = ("speech", "text", "common")

# Numbers of fields in descriptor.proto, which source locations are paths of.
MESSAGE, ENUM, SERVICE = 4, 5, 6
MEMBER = 2  # of a message's fields, an enum's values, a service's methods

Comments = Mapping[tuple[int, ...], str]


def protocol_reference(folder: Path = PROTO) -> str:
    """Markdown of every service, message and enum of the contract."""
    lines: list[str] = []
    for file in read_protos(folder):
        lines += _file_lines(file)
    return "\n".join(lines)


def read_protos(folder: Path = PROTO) -> list[FileDescriptorProto]:
    """The descriptors of the contract's files with their comments, services first.

    Raises `RuntimeError` when a file does not compile.
    """
    paths = [f"tts/v1/{name}.proto" for name in ORDER]
    with tempfile.TemporaryDirectory() as out:
        target = Path(out) / "descriptors"
        options = ["-I", str(folder), "--include_source_info", f"--descriptor_set_out={target}"]
        well_known = ["-I", str(Path(protoc.__file__).parent / "_proto")]
        if protoc.main(["protoc", *options, *well_known, *paths]):
            raise RuntimeError(f"protoc refuses the files in {folder}")
        found = FileDescriptorSet.FromString(target.read_bytes())
    return sorted(found.file, key=lambda file: paths.index(file.name))


def _file_lines(file: FileDescriptorProto) -> Iterator[str]:
    comments = _comments(file)
    yield from (f"## {Path(file.name).name}", "")
    for index, service in enumerate(file.service):
        yield from _service_lines(service, comments, (SERVICE, index))
    for index, message in enumerate(file.message_type):
        yield from _message_lines(message, comments, (MESSAGE, index))
    for index, enum in enumerate(file.enum_type):
        yield from _enum_lines(enum, comments, (ENUM, index))


def _comments(file: FileDescriptorProto) -> Comments:
    """Comments by location: the one above an element and the one behind it, in one line."""
    return {
        tuple(location.path): " ".join(
            f"{location.leading_comments} {location.trailing_comments}".split()
        )
        for location in file.source_code_info.location
    }


def _service_lines(
    service: ServiceDescriptorProto, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    rows = [
        (
            f"`{method.name}`",
            _streamed(method.input_type, is_stream=method.client_streaming),
            _streamed(method.output_type, is_stream=method.server_streaming),
            comments.get((*path, MEMBER, index), ""),
        )
        for index, method in enumerate(service.method)
    ]
    yield from _section(service.name, comments.get(path, ""))
    yield from _table(("method", "request", "response", "meaning"), rows)


def _message_lines(
    message: DescriptorProto, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    rows = [
        (
            f"`{field.name}`",
            _type(field),
            " ".join(filter(None, (_choice(message, field), comments.get((*path, MEMBER, i), "")))),
        )
        for i, field in enumerate(message.field)
    ]
    yield from _section(message.name, comments.get(path, ""))
    yield from _table(("field", "type", "meaning"), rows) if rows else ("No fields.", "")


def _enum_lines(
    enum: EnumDescriptorProto, comments: Comments, path: tuple[int, ...]
) -> Iterator[str]:
    rows = [
        (f"`{value.name}`", str(value.number), comments.get((*path, MEMBER, index), ""))
        for index, value in enumerate(enum.value)
    ]
    yield from _section(enum.name, comments.get(path, ""))
    yield from _table(("value", "number", "meaning"), rows)


def _section(name: str, comment: str) -> Iterator[str]:
    yield from (f"### {name}", "")
    if comment:
        yield from (_escaped(comment), "")


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield _row(head)
    yield _row(["---"] * len(head))
    yield from map(_row, rows)
    yield ""


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(map(_escaped, cells))} |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")


def _choice(message: DescriptorProto, field: FieldDescriptorProto) -> str:
    """Return the group that a field is one of, and whether it may be unset."""
    if field.proto3_optional:
        return "Optional."
    if field.HasField("oneof_index"):
        return f"One of `{message.oneof_decl[field.oneof_index].name}`."
    return ""


def _type(field: FieldDescriptorProto) -> str:
    repeated = field.label == FieldDescriptorProto.LABEL_REPEATED
    kind = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    name = _linked(field.type_name) if field.type_name else f"`{kind}`"
    return f"repeated {name}" if repeated else name


def _streamed(type_name: str, *, is_stream: bool) -> str:
    return f"stream of {_linked(type_name)}" if is_stream else _linked(type_name)


def _linked(type_name: str) -> str:
    """A link to the section of one of our types; others by their name."""
    package, _, name = type_name.removeprefix(".").rpartition(".")
    return f"[{name}](#{name.lower()})" if package == "tts.v1" else f"`{package}.{name}`"
