"""Generate text over gRPC and print it as it arrives, with the engine that also generates speech.

python -m samples.generate_text "Once upon a time" --server localhost:50051
"""

from __future__ import annotations

import argparse

import grpc

from tts.v1 import common_pb2, text_pb2, text_pb2_grpc


def main() -> None:
    parser = argparse.ArgumentParser(description="Generate text over gRPC.")
    parser.add_argument("prompt")
    parser.add_argument("--server", default="localhost:50051")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true", help="send the prompt as a chat message")
    arguments = parser.parse_args()

    if arguments.chat:
        message = text_pb2.ChatMessage(role=text_pb2.CHAT_ROLE_USER, content=arguments.prompt)
        text = text_pb2.GenerationInput(chat=text_pb2.ChatMessages(messages=[message]))
    else:
        text = text_pb2.GenerationInput(prompt=arguments.prompt)
    sampling = common_pb2.SamplingParams(max_tokens=arguments.max_tokens, temperature=0)
    request = text_pb2.GenerateStreamRequest(
        config=text_pb2.GenerationConfig(sampling=sampling), input=text
    )
    with grpc.insecure_channel(arguments.server) as channel:
        for event in text_pb2_grpc.TextServiceStub(channel).GenerateStream(request):
            kind = event.WhichOneof("event")
            if kind == "delta":
                print(event.delta.text, end="", flush=True)
            elif kind == "done":
                usage = event.done.usage
                print(f"\n[{usage.prompt_tokens} tokens in, {usage.output_tokens} out]")


if __name__ == "__main__":
    main()
