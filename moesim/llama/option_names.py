"""Owns the names of the options of llama.cpp and ik_llama.cpp: what is read, and what is accepted without a counterpart.

From llama.cpp's tools/server/README.md, tools/llama-bench/README.md and common/arg.cpp (older names included), ik_llama.cpp's
docs/parameters.md and common/common.cpp.
"""

from __future__ import annotations

# field -> its names. Fields of the first table take a value, of the second none or one of 0, 1, on, off, auto.
VALUES = {
    "model": "-m --model", "hf_repo": "-hf -hfr --hf-repo", "hf_file": "-hff --hf-file", "gpu_layers": "-ngl --n-gpu-layers --gpu-layers",
    "n_cpu_moe": "-ncmoe --n-cpu-moe", "override": "-ot --override-tensor --override-tensors", "ubatch": "-ub --ubatch-size",
    "batch": "-b --batch-size", "load_mode": "-lm --load-mode", "split_mode": "-sm --split-mode", "tensor_split": "-ts --tensor-split",
    "main_gpu": "-mg --main-gpu", "cache_k": "-ctk --cache-type-k", "cache_v": "-ctv --cache-type-v", "context": "-c --ctx-size",
    "threads": "-t --threads", "parallel": "-np --parallel", "mla": "-mla --mla-use", "generate": "-n --n-gen --n-predict --predict",
    "prompt": "--n-prompt", "depth": "-d --n-depth", "pair": "-pg",
}  # fmt: skip
FLAGS = {
    "cpu_moe": "-cmoe --cpu-moe", "no_kv_offload": "-nkvo --no-kv-offload", "no_mmap": "--no-mmap", "mmap": "--mmap -mmp", "mlock": "--mlock",
    "flash": "-fa --flash-attn", "no_flash": "-no-fa --no-fa --no-flash-attn", "repack": "-rtr --run-time-repack",
    "fused_moe": "-fmoe --fused-moe", "no_fused_moe": "-no-fmoe --no-fmoe --no-fused-moe", "no_op_offload": "-nopo --no-op-offload",
}  # fmt: skip
# Of a draft model or another way to guess tokens: with a value, and without.
DRAFT_VALUES = """
-md --model-draft --spec-draft-model -hfd -hfrd --hf-repo-draft --spec-draft-hf -cd --ctx-size-draft --spec-draft-ctx-size -ngld --gpu-layers-draft
--n-gpu-layers-draft --spec-draft-ngl -devd --device-draft --spec-draft-device -ctkd --cache-type-k-draft --spec-draft-type-k -ctvd
--cache-type-v-draft --spec-draft-type-v -otd --override-tensor-draft --spec-draft-override-tensor -ncmoed --n-cpu-moe-draft
--spec-draft-n-cpu-moe --spec-draft-ncmoe -td --threads-draft --spec-draft-threads -tbd --threads-batch-draft --spec-draft-threads-batch
-Cd --cpu-mask-draft -Crd --cpu-range-draft --cpu-strict-draft --prio-draft --poll-draft -Cbd --cpu-mask-batch-draft
--draft --draft-n --draft-max --draft-min --draft-n-min --draft-p-min --draft-p-split -ps --p-split -draft --draft-params
--spec-draft-n-max --spec-draft-n-min --spec-draft-p-min --spec-draft-p-split --spec-draft-sampling --spec-type --spec-ngram-size-n
--spec-ngram-size-m --spec-ngram-min-hits --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match --spec-ngram-simple-size-n
--spec-ngram-simple-size-m --spec-ngram-simple-min-hits --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits
--spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits -lcs --lookup-cache-static -lcd --lookup-cache-dynamic
""".split()
DRAFT_FLAGS = (
    "-cmoed --cpu-moe-draft --spec-draft-cpu-moe --spec-draft-backend-sampling --spec-default -mtp --multi-token-prediction".split()
)
# Without a counterpart: with a value, and without.
OTHER_VALUES = """
-r --repetitions -o --output -oe --output-err --delay --prio --poll -C --cpu-mask --cpu-strict -Cb --cpu-mask-batch -tb --threads-batch --numa
-dev --device -rpc --rpc -fitt --fit-target -fitc --fit-ctx --fit-margin -s --seed --temp --temperature --top-k --top-p --min-p --samplers
--repeat-penalty --presence-penalty --frequency-penalty --host --port --api-key -a --alias --chat-template --chat-template-file
--chat-template-kwargs --reasoning-format --reasoning-budget -f --file -sys --system-prompt --rope-scaling --rope-scale --rope-freq-base
--rope-freq-scale --yarn-orig-ctx --keep -cram --cache-ram --cache-reuse -amb --attention-max-batch -ser --smart-expert-reduction
--n-gen-warmup -lzm --lazy-mode --lora --lora-scaled --control-vector --control-vector-scaled -mm --mmproj -mmu --mmproj-url -to --timeout
--slot-save-path -ctxcp --ctx-checkpoints --swa-checkpoints -cms --checkpoint-min-step --override-kv --pooling -dt --defrag-thold
--threads-http --log-file -lv --verbosity --log-verbosity --models-dir --models-preset --models-max --media-path --api-key-file --api-prefix
--path --ssl-key-file --ssl-cert-file -sps --slot-prompt-similarity --sleep-idle-seconds --tags --embd-normalize -hft --hf-token -mu --model-url
-Cr --cpu-range -Crb --cpu-range-batch --prio-batch --poll-batch --cpu-strict-batch --yarn-ext-factor --yarn-attn-factor --yarn-beta-slow
--yarn-beta-fast --repeat-last-n --typical --typical-p --top-nsigma --top-n-sigma --xtc-probability --xtc-threshold --dry-multiplier --dry-base
--dry-allowed-length --dry-penalty-last-n --dry-sequence-breaker --dynatemp-range --dynatemp-exp --mirostat --mirostat-lr --mirostat-ent
-l --logit-bias --grammar --grammar-file -j --json-schema -jf --json-schema-file --sampler-seq --sampling-seq --image-min-tokens
--image-max-tokens --moe-cache-mib -ncffn --n-cpu-ffn --kv-unified-per-slot --tools --reasoning-effort -grt --graph-reduce-type
-cuda --cuda-params -op --offload-policy -wgt --worst-graph-tokens -gap -crs --cache-ram-similarity -cram-n-min --cache-ram-n-min
--max-gpu --max-gpu-per-split --reasoning-tokens
""".split()
OTHER_FLAGS = """
-v --verbose --log-verbose --progress --no-warmup --warmup -w --offline -cnv --conversation -no-cnv --no-conversation -i --interactive
-st --single-turn -e --escape --no-escape --color --no-display-prompt --jinja --no-jinja --metrics --slots --no-slots --webui --no-webui --ui
--no-ui -cb --cont-batching -nocb --no-cont-batching --ignore-eos --verbose-prompt --swa-full -kvu --kv-unified -no-kvu --no-kv-unified
--no-context-shift --context-shift --repack -nr --no-repack --no-host --check-tensors --warmup-batch -ger --grouped-expert-routing -gr
--graph-reuse -no-gr --no-gr --no-graph-reuse --cache-prompt --no-cache-prompt -mqkv --merge-qkv -dio --direct-io --log-disable -fit --fit
-embd --embd --embeddings --embedding --rerank --reranking --props --perf --no-perf -kvo --kv-offload --op-offload --log-prefix --no-log-prefix
--log-timestamps --no-log-timestamps --log-colors -sp --special --no-mmproj --no-mmproj-auto --mmproj-auto --mmproj-offload
--no-mmproj-offload -rea --reasoning --reuse-port --models-autoload --no-models-autoload --prefill-assistant --no-prefill-assistant
--cache-idle-slots --no-cache-idle-slots --lora-init-without-apply -bs --backend-sampling -khad --k-cache-hadamard -vhad --v-cache-hadamard
-smgs --split-mode-graph-scheduling -smf32 -smf16 -muge --merge-up-gate-experts --merge-up-gate-exps -sas --scheduler_async --scheduler-async
-no-ooae --no-offload-only-active-experts -ooae -thp --transparent-huge-pages -vq --validate-quants -rcache --rope-cache -no-fug --no-fug
--no-fused-up-gate -no-mmad --no-mmad --no-fused-mul-multiadd -dkvc --dump-kv-cache
""".split()
FORK_FIELDS = ("repack", "fused_moe", "no_fused_moe", "mla")
FORK_NAMES = """
-amb --attention-max-batch -ser --smart-expert-reduction -ger -gr -mqkv -no-fa -no-fmoe -khad --k-cache-hadamard -vhad -smgs -muge -sas -no-ooae
-thp -vq -cuda --cuda-params -rcache -grt -no-fug -no-mmad -mtp -draft
""".split()
