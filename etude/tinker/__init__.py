"""The Tinker API over this machine: programs written for the official SDK train LoRA adapters here (`etude tinker`).

`server` has the paths, `service` sessions and futures, `adapters` what is computed, `checkpoints` what is kept, `wire` the
SDK's messages. The SDK's own types and protocol buffers are the schema; importing a module of this room imports the SDK.
"""
