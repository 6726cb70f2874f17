"""What vLLM and SGLang accept: signatures read from the source of the versions that the engines are written for, kept in
`signatures.json` as texts of parameters. From unpacked wheels (`pip download --no-deps vllm==0.32.0 sglang==0.5.23`):

    python tests/inference/signatures.py VLLM_FOLDER SGLANG_FOLDER
"""

import ast
import inspect
import json
import sys
from pathlib import Path

FILE = Path(__file__).with_name("signatures.json")
CALLED = [
    "from_engine_args",
    "generate",
    "abort",
    "check_health",
    "pause_generation",
    "resume_generation",
    "collective_rpc",
]
CALLED += ["reset_prefix_cache", "update_weight_version", "sleep", "wake_up", "shutdown"]
METHODS = {f"AsyncLLM.{name}": ("vllm/v1/engine/async_llm.py", "AsyncLLM", name) for name in CALLED}
METHODS["GPUModelRunner.reload_weights"] = ("vllm/v1/worker/gpu_model_runner.py", "GPUModelRunner", "reload_weights")
CLASSES = {  # whose fields are parameters
    "vllm.AsyncEngineArgs": [("vllm/engine/arg_utils.py", name) for name in ("EngineArgs", "AsyncEngineArgs")],
    "vllm.SamplingParams": [("vllm/sampling_params.py", "SamplingParams")],
    "sglang.SamplingParams": [("sglang/srt/sampling/sampling_params.py", "SamplingParams")],
    "/generate": [("sglang/srt/managers/io_struct.py", "GenerateReqInput")],
} | {
    path: [("sglang/srt/managers/io_struct.py", name) for name in ("BaseReq", kind)]
    for path, kind in {
        "/abort_request": "AbortReq",
        "/pause_generation": "PauseGenerationReqInput",
        "/continue_generation": "ContinueGenerationReqInput",
        "/update_weights_from_disk": "UpdateWeightFromDiskReqInput",
        "/load_lora_adapter": "LoadLoRAAdapterReqInput",
        "/unload_lora_adapter": "UnloadLoRAAdapterReqInput",
        "/release_memory_occupation": "ReleaseMemoryOccupationReqInput",
        "/resume_memory_occupation": "ResumeMemoryOccupationReqInput",
    }.items()
}


def signature(name):
    """What `name` accepts."""
    return inspect.signature(eval(f"lambda {json.loads(FILE.read_text())[name]}: None"))


def read_class(folders, file, name):
    [path] = [folder / file for folder in folders if (folder / file).exists()]
    tree = ast.parse(path.read_text())
    return next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == name)


def parameters_of(function):
    """The parameters without `self`, annotations, and the values of defaults."""
    given = function.args
    for each in (*given.args, *given.kwonlyargs):
        each.annotation = None
    given.args = given.args[1:]
    given.defaults, given.kw_defaults = (
        [each and ast.Constant(None) for each in defaults] for defaults in (given.defaults, given.kw_defaults)
    )
    return ast.unparse(given)


def fields_of(nodes):
    fields = [each for node in nodes for each in node.body if isinstance(each, ast.AnnAssign)]
    kept = {each.target.id: each for each in fields if "ClassVar" not in ast.unparse(each.annotation)}
    return "*, " + ", ".join(name + ("=None" if each.value else "") for name, each in kept.items())


def main(*folders):
    folders = [Path(each) for each in folders]
    found = {}
    for key, (file, owner, name) in METHODS.items():
        body = read_class(folders, file, owner).body
        found[key] = parameters_of(next(each for each in body if getattr(each, "name", None) == name))
    for key, sources in CLASSES.items():
        found[key] = fields_of([read_class(folders, *source) for source in sources])
    FILE.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
