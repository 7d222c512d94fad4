"""The peer of `cpu.py`: the forward of `nemo-automodel` (Apache-2.0), asked over standard input.

It runs under an interpreter in which `nemo_automodel` is importable, which needs other package
versions than the library. It loads a float32 checkpoint with the released names and answers lines
`[tokens.npy, logits.npy]` with the seconds that one forward took: float32, eager, two threads.
"""

import json
import os
import sys
import time
from importlib.metadata import version

import numpy as np
import torch
from nemo_automodel.components.models.common import BackendConfig
from nemo_automodel.components.models.deepseek_v41.config import DeepseekV41Config
from nemo_automodel.components.models.deepseek_v41.model import DeepseekV41ForCausalLM
from safetensors.torch import load_file

THREADS = 2


def load(folder: str, attention: str) -> DeepseekV41ForCausalLM:
    """The model of a checkpoint folder, in float32, with plain torch back ends."""
    config = DeepseekV41Config.from_pretrained(folder)
    config.text_config.dtype = "float32"  # the key at the top of config.json does not reach it
    backend = BackendConfig(
        attn=attention, linear="torch", rms_norm="torch_fp32", experts="torch", dispatcher="torch"
    )
    model = DeepseekV41ForCausalLM(config, backend=backend).eval()
    weights = load_file(os.path.join(folder, "model.safetensors"))
    model.load_state_dict(model.state_dict_adapter.from_hf(weights), strict=True)
    return model


def main() -> None:
    """Answer until standard input ends."""
    # Libraries print to standard output as they like; answers have a way of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    torch.set_num_threads(THREADS)
    model = load(sys.argv[1], "eager")
    name = f"nemo-automodel {version('nemo-automodel')}"
    print(json.dumps({"name": name}), file=answers, flush=True)
    for line in sys.stdin:
        question, answer = json.loads(line)
        tokens = torch.from_numpy(np.load(question)).long()
        wall, processor = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            logits = model(tokens).logits
        times = {
            "wall": time.perf_counter() - wall,
            "processor": time.process_time() - processor,
        }
        np.save(answer, logits.numpy())
        print(json.dumps(times), file=answers, flush=True)


if __name__ == "__main__":
    main()
