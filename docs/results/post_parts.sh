# The commands that made the results of post_parts.md.

halflife compare mamba2-parts --experiment post-taken-apart --scale smoke --seeds 3 --tune-seeds 1
halflife compare mamba2 mamba2:static mamba2:frozen mamba2:theorem mamba2:gain mamba2:gain-held mamba2:geometric mamba2:gain-moving \
    --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 0.03
halflife compare mamba2:post mamba2:slow0.01 mamba2:ordered mamba2:slow0.1 mamba2:theorem-slow0.01 mamba2:optimal mamba2:held mamba2:gain-theorem \
    mamba2:moving --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 0.01
halflife compare mamba2 mamba2:static --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 1 2 3 4 --lr 0.01
halflife compare mamba2:post mamba2:slow0.01 --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 1 2 3 4 --lr 0.03
halflife compare mamba2 mamba2:static mamba2:frozen mamba2:theorem mamba2:gain mamba2:gain-held mamba2:geometric mamba2:gain-moving \
    --experiment post-taken-apart --scale smoke --seeds 1 --lr 0.1
halflife compare gla gla:post gla:static gla:slow0.01 gla:gain --experiment post-taken-apart --scale smoke --seeds 3 --tune-seeds 1
halflife compare gla gla:post gla:static gla:slow0.01 gla:gain --experiment post-taken-apart --scale smoke --seeds 1 --lr 0.1
halflife compare gla gla:post gla:static gla:slow0.01 --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 0.03
halflife compare gla:{ordered,theorem,slow0.1,theorem-slow0.01,optimal,moving,held,gain-theorem,gain-held,gain-moving} \
    --experiment post-taken-apart --scale smoke --seeds 3 --tune-seeds 1 --lr 3e-2 1e-2 1e-1
halflife compare gla:{moving,theorem,theorem-slow0.01,gain,ordered,slow0.1,optimal,held,gain-theorem,gain-held} \
    --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 3e-2
halflife compare gla:gain-moving --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 1e-2
halflife compare gated_deltanet gated_deltanet:post gated_deltanet:static gated_deltanet:slow0.01 gated_deltanet:gain \
    --experiment post-taken-apart --scale smoke --seeds 3 --tune-seeds 1
halflife compare gated_deltanet --experiment post-taken-apart --scale smoke --seeds 3 --only-seeds 1 2 --lr 1e-2
halflife compare gated_deltanet:post gated_deltanet:static gated_deltanet:slow0.01 gated_deltanet:gain \
    --experiment post-taken-apart --scale smoke --seeds 3 --only-seeds 1 2 --lr 3e-2
halflife compare gated_deltanet:geometric --experiment post-taken-apart --scale smoke --seeds 5 --lr 1e-2 3e-2
halflife compare gated_deltanet:{ordered,frozen,theorem,slow0.1,theorem-slow0.01,optimal,moving,held,gain-held,gain-moving} \
    --experiment post-taken-apart --scale smoke --seeds 3 --tune-seeds 1
halflife compare gated_deltanet:{ordered,frozen,theorem,slow0.1,held,gain-held,gain-moving} --experiment post-taken-apart --scale smoke \
    --seeds 5 --only-seeds 3 4 --lr 1e-2
halflife compare gated_deltanet:{theorem-slow0.01,optimal,moving} --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 3e-2
halflife compare gated_deltanet --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 3e-2 1e-2
halflife compare gated_deltanet:{post,static,slow0.01,gain} --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 1e-2
halflife compare gated_deltanet --experiment post-taken-apart --scale smoke --seeds 1 --lr 1e-1
halflife compare gated_deltanet:geometric --experiment post-taken-apart --scale smoke --seeds 1 --lr 3e-3
halflife compare retnet retnet:post retnet:static retnet:slow0.01 --experiment post-taken-apart --scale smoke --seeds 3 --tune-seeds 1
halflife compare retnet retnet:post retnet:static retnet:slow0.01 --experiment post-taken-apart --scale smoke --seeds 1 --lr 0.1
halflife compare retnet retnet:post retnet:static retnet:slow0.01 --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 3e-2
halflife compare retnet:{trained,geometric,geometric-trained} --experiment post-taken-apart --scale smoke --seeds 5 --tune-seeds 1 \
    --lr 3e-2 1e-2 1e-1
halflife compare rwkv7 rwkv7:post rwkv7:static rwkv7:slow0.01 rwkv7:gain --experiment post-taken-apart --scale smoke \
    --seeds 3 --tune-seeds 1
halflife compare rwkv7 --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 0.003
halflife compare rwkv7:slow0.01 rwkv7:post --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 0.03
halflife compare rwkv7:{optimal,held,gain-held,theorem,slow0.1,theorem-slow0.01} --experiment post-taken-apart --scale smoke \
    --seeds 3 --tune-seeds 1
halflife compare rwkv7:{static,gain,theorem,slow0.1,gain-held} --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 1e-2
halflife compare rwkv7:{theorem-slow0.01,optimal,held} --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 3e-2
halflife compare gated_deltanet+post_released gla+post_released rwkv7+post_released --experiment post-taken-apart --scale smoke \
    --seeds 5 --tune-seeds 1
halflife compare gated_deltanet+post_released gla+post_released rwkv7+post_released --experiment post-taken-apart --scale smoke \
    --seeds 1 --lr 0.1

halflife compare mamba2 --experiment overview --scale small --seeds 5 --lr 0.003 --set decay.rate_start=geometric decay.train_length=64
halflife compare mamba2+post --experiment overview --scale small --seeds 5 --lr 0.003 --set post.stretch=false
halflife compare retnet+post --experiment overview --scale small --seeds 3 --lr 0.003 --set post.stretch=false
halflife compare retnet --experiment overview --scale small --seeds 3 --lr 0.003 --set decay.trained_rates=true
halflife compare mamba2 --experiment overview --scale small --seeds 1 --lr 1e-3 1e-2 --set decay.rate_start=geometric decay.train_length=64
halflife compare mamba2+post --experiment overview --scale small --seeds 1 --lr 1e-3 1e-2 --set post.stretch=false
halflife compare retnet+post --experiment overview --scale small --seeds 1 --lr 1e-3 1e-2 --set post.stretch=false
halflife compare retnet --experiment overview --scale small --seeds 1 --lr 1e-2 1e-3 --set decay.trained_rates=true
halflife compare retnet --experiment overview --scale small --seeds 3 --only-seeds 1 2 --lr 1e-2 --set decay.trained_rates=true
halflife compare retnet+post --experiment overview --scale small --seeds 5 --only-seeds 3 4 --lr 0.003 --set post.stretch=false
halflife compare retnet --experiment overview --scale small --seeds 5 --only-seeds 3 4 --lr 1e-2 --set decay.trained_rates=true
halflife compare rwkv7+post --experiment overview --scale small --seeds 3 --tune-seeds 1 --lr 0.003 0.001 0.01
halflife compare gated_deltanet+post --experiment overview --scale small --seeds 3 --tune-seeds 1 --lr 0.01 0.003 0.03
halflife compare gated_deltanet+post --experiment overview --scale small --seeds 1 --lr 0.001
halflife compare gated_deltanet+post --experiment overview --scale small --seeds 3 --only-seeds 1 2 --lr 0.01
halflife compare gla:mamba2-decay --experiment post-taken-apart --scale smoke --seeds 3 --tune-seeds 1 --lr 3e-3 1e-2 3e-2
halflife compare gla:mamba2-decay --experiment post-taken-apart --scale smoke --seeds 1 --lr 0.1
halflife compare gla:mamba2-decay --experiment post-taken-apart --scale smoke --seeds 5 --only-seeds 3 4 --lr 0.03
