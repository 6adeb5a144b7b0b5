# The commands that made the results of post_parts_text.md.

halflife compare mamba2 mamba2:post mamba2:gain mamba2:static mamba2:held mamba2:ordered mamba2:slow0.01 mamba2:theorem \
    mamba2:gain-held mamba2:frozen mamba2:frozen-gain mamba2:gain-theorem --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 5e-4 1e-3 2e-3 4e-3
halflife compare mamba2:geometric mamba2:slow0.1 mamba2:theorem-slow0.01 mamba2:optimal mamba2:moving mamba2:gain-moving \
    --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 1e-3 2e-3 4e-3
halflife compare mamba2:slow0.1 mamba2:optimal mamba2:moving --resume FOLDER --lr 5e-4 --only-seeds 0
halflife compare mamba2 --experiment post-taken-apart-text --scale small --seeds 3 --lr 2e-3
halflife compare mamba2:head-norm mamba2:plain-head-norm mamba2:gain-head-norm --experiment post-taken-apart-text --scale small \
    --seeds 3 --tune-seeds 1 --lr 1e-3 2e-3 4e-3
halflife compare mamba2:head-norm --resume FOLDER --lr 5e-4 --only-seeds 0
halflife compare mamba2 --experiment post-taken-apart-text --scale small --seeds 3 --lr 2e-3
halflife compare mamba2:slow0.01-head-norm --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 1e-3 5e-4 2e-3 --set training.bf16=false
halflife compare mamba2:static-head-norm --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 2e-3 1e-3 4e-3 \
    --set training.bf16=false
halflife compare mamba2:plain-head-norm mamba2 --experiment post-taken-apart-text --scale small --seeds 3 --lr 2e-3 --set training.bf16=false
halflife compare gla gla:{post,ordered,static,theorem,gain,slow0.01,moving,optimal} --experiment post-taken-apart-text --scale small \
    --seeds 3 --tune-seeds 1 --lr 1e-3 5e-4 2e-3 --set training.bf16=false
halflife compare gla:ordered --experiment post-taken-apart-text --scale small --seeds 1 --lr 4e-3 --set training.bf16=false
halflife compare gla gla:post gla:static --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 --lr 1e-3 --set training.bf16=false
halflife compare gla:held gla:gain-held --experiment post-taken-apart-text --scale small --seeds 3 --lr 1e-3 --set training.bf16=false
halflife compare gla:{slow0.1,theorem-slow0.01,gain-moving,gain-theorem} --experiment post-taken-apart-text --scale small \
    --seeds 3 --tune-seeds 1 --lr 1e-3 5e-4 2e-3 --set training.bf16=false
halflife compare gated_deltanet gated_deltanet:{post,ordered,geometric,static,theorem,gain,slow0.01,frozen,moving,optimal} \
    --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 1e-3 5e-4 2e-3 --set training.bf16=false
halflife compare gated_deltanet:{post,geometric,static,theorem,slow0.01,frozen,moving} --experiment post-taken-apart-text --scale small --seeds 1 --lr 4e-3 \
    --set training.bf16=false
halflife compare gated_deltanet --experiment post-taken-apart-text --scale small --seeds 3 --only-seeds 1 2 --lr 2e-3 --set training.bf16=false
halflife compare gated_deltanet gated_deltanet:ordered --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 --lr 1e-3 \
    --set training.bf16=false
halflife compare gated_deltanet:post gated_deltanet:static --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 --lr 2e-3 \
    --set training.bf16=false
halflife compare gated_deltanet:held --experiment post-taken-apart-text --scale small --seeds 3 --lr 2e-3 --set training.bf16=false
halflife compare gated_deltanet:gain-held --experiment post-taken-apart-text --scale small --seeds 3 --lr 1e-3 --set training.bf16=false
halflife compare gated_deltanet:{slow0.1,theorem-slow0.01,gain-moving} --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 2e-3 1e-3 4e-3 --set training.bf16=false
halflife compare gated_deltanet:gain-moving --experiment post-taken-apart-text --scale small --seeds 1 --lr 5e-4 --set training.bf16=false
halflife compare rwkv7 rwkv7:{post,static,gain,theorem,slow0.1,slow0.01,theorem-slow0.01,optimal} --experiment post-taken-apart-text --scale small \
    --seeds 3 --tune-seeds 1 --lr 2e-3 1e-3 4e-3 --set training.bf16=false
halflife compare rwkv7 rwkv7:post rwkv7:static --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 --lr 2e-3 --set training.bf16=false
halflife compare rwkv7:held rwkv7:gain-held --experiment post-taken-apart-text --scale small --seeds 3 --lr 2e-3 --set training.bf16=false
halflife compare retnet retnet:post --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 2e-3 1e-3 4e-3 \
    --set training.bf16=false
halflife compare retnet retnet:post --experiment post-taken-apart-text --scale small --seeds 1 --lr 5e-4 --set training.bf16=false
halflife compare retnet:static --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 1e-3 5e-4 2e-3 \
    --set training.bf16=false
halflife compare retnet:static --experiment post-taken-apart-text --scale small --seeds 1 --lr 4e-3 --set training.bf16=false
halflife compare retnet:trained retnet:geometric-trained retnet:geometric --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 1e-3 5e-4 2e-3 --set training.bf16=false
halflife compare retnet retnet:post retnet:trained retnet:geometric --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 \
    --lr 1e-3 --set training.bf16=false
halflife compare retnet:static --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 --lr 2e-3 --set training.bf16=false
halflife compare gla+post_released gated_deltanet+post_released rwkv7+post_released --experiment post-taken-apart-text --scale small \
    --seeds 3 --tune-seeds 1 --set training.bf16=false
halflife compare rwkv7+post_released --experiment post-taken-apart-text --scale small --seeds 1 --lr 4e-3 --set training.bf16=false
halflife compare gla gated_deltanet --experiment post-taken-apart-text --scale small --seeds 3 --lr 1e-3 --set training.bf16=false
halflife compare rwkv7 --experiment post-taken-apart-text --scale small --seeds 3 --lr 2e-3 --set training.bf16=false
halflife compare mamba2 mamba2:frozen-gain mamba2:static mamba2:gain --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 --lr 2e-3
halflife compare mamba2:post mamba2:frozen --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 --lr 1e-3
halflife compare gla gla+post_released gated_deltanet gated_deltanet+post_released --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 \
    --lr 1e-3 --set training.bf16=false
halflife compare rwkv7 rwkv7+post_released gated_deltanet:frozen --experiment post-taken-apart-text --scale small --seeds 5 --only-seeds 3 4 \
    --lr 2e-3 --set training.bf16=false
