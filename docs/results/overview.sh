# The commands that made the results of overview.md.

halflife compare gated_deltanet mamba2 llama gla mamba2+attention mamba2+ska deltaproduct 'gated_deltanet@state(mamba2+ska)' \
    'gated_deltanet@parameters(deltaproduct)' gated_deltanet+ska mamba2+gate_rank mamba2+post 'mamba2@state(mamba2+gate_rank)' \
    --experiment overview --scale small --seeds 3 --tune-seeds 1 --output runs/overview
halflife compare mamba2+ska --resume runs/overview --lr 0.03
halflife compare gated_deltanet+ska --resume runs/overview --lr 0.1
halflife compare retnet simple rwkv7 hgrn2 deltanet tnl lightnet --experiment overview --scale small --seeds 3 \
    --tune-seeds 1 --output runs/overview_more
halflife compare gated_deltanet llama gla deltaproduct gated_deltanet+ska mamba2+gate_rank retnet simple rwkv7 hgrn2 deltanet tnl lightnet \
    --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 5e-4 1e-3 2e-3 4e-3 --output runs/overview/text
halflife compare mamba2 mamba2+attention mamba2+ska --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 1e-3 2e-3 4e-3 --output runs/overview_mamba2/text
halflife compare mamba2+post --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 5e-4 1e-3 2e-3 \
    --output runs/overview_post/text
halflife compare kda comba gated_deltanet+attention fox --experiment overview --scale small --seeds 3 --tune-seeds 1 \
    --output runs/overview_later
halflife compare kda comba gated_deltanet+attention --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 1e-3 2e-3 4e-3 5e-4 --output runs/overview_later/text
halflife compare tnl_released mesa --experiment overview --scale small --seeds 3 --tune-seeds 1 --output runs/overview_last
halflife compare tnl_released --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 5e-4 1e-3 2e-3 4e-3 --output runs/overview_last/text
halflife compare fox --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 5e-4 1e-3 2e-3 \
    --output runs/overview_fox/text
halflife compare gdn2 gated_deltanet+gate_rank --experiment overview --scale small --seeds 3 --tune-seeds 1 --output runs/overview_rank
halflife compare gated_deltanet+gate_rank --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 5e-4 1e-3 2e-3 \
    --set training.bf16=false --output runs/overview_rank/text
halflife compare longhorn tnl_l mamba3_echo --experiment overview --scale small --seeds 3 --tune-seeds 1 --output runs/overview_rest
halflife compare tnl_l --resume runs/overview_rest --lr 0.03
halflife compare longhorn mamba2+gate_rank 'mamba2@state(mamba2+gate_rank)' --experiment overview --scale small --seeds 1 --lr 0.03 \
    --output runs/overview_edge
halflife compare mamba3_mimo --experiment overview --scale small --seeds 3 --tune-seeds 1 --set mixer.rate_floor=null --output runs/overview_mimo
halflife compare rwkv7 gla --experiment overview --scale small --seeds 3 --only-seeds 1 2 --lr 0.01 --output runs/overview_rates
halflife compare mamba2 mamba2+post --experiment overview --scale small --seeds 5 --only-seeds 3 4 --lr 0.003 --output runs/overview_five
halflife compare mamba2 --experiment overview --scale small --seeds 3 --lr 0.005 0.002 --output runs/finer
halflife compare mamba2+post --experiment overview --scale small --seeds 1 --lr 0.005 0.002 --output runs/finer_post
halflife compare longhorn tnl_l mamba2+gate_rank 'mamba2@state(mamba2+gate_rank)' --experiment overview --scale small --seeds 5 \
    --only-seeds 3 4 --lr 0.01 --output runs/overview_seeds
halflife compare rwkv7 gla --experiment overview --scale small --seeds 5 --only-seeds 3 4 --lr 0.003 --output runs/overview_more_seeds
halflife compare longhorn tnl_l gdn2 mamba3_echo mesa mamba3 --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 1e-3 2e-3 5e-4 --set training.bf16=false --output runs/overview_rest/text
halflife compare mamba3_mimo --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 1e-3 2e-3 5e-4 \
    --set training.bf16=false mixer.rate_floor=null --output runs/overview_mimo/text
halflife compare mamba3 --experiment post-taken-apart-text --scale small --seeds 1 --lr 4e-3 --set training.bf16=false
halflife compare tnl_l gdn2 gated_deltanet+gate_rank --experiment post-taken-apart-text --scale small --seeds 1 --lr 4e-3 \
    --set training.bf16=false --output runs/overview_high/text
halflife compare simple --experiment post-taken-apart-text --scale small --seeds 1 --lr 8e-3 1.6e-2 --set training.bf16=false
halflife compare lightnet --experiment post-taken-apart-text --scale small --seeds 1 --lr 2.5e-4 --set training.bf16=false
halflife compare 'mamba2@state(mamba2+ska)' --experiment overview --scale small --seeds 3 --tune-seeds 1 --lr 3e-3 1e-3 1e-2 \
    --output runs/overview_ska
halflife compare 'gated_deltanet@state(mamba2)' --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 1e-3 2e-3 5e-4 --set training.bf16=false --output runs/overview_state/text
halflife compare gated_deltanet --experiment post-taken-apart-text --scale small --seeds 3 --lr 1e-3 --set training.bf16=false
halflife compare 'mamba2@state(mamba2+ska)' --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 2e-3 1e-3 4e-3 \
    --set training.bf16=false
halflife compare 'comba@state(mamba2)' 'longhorn@state(mamba2)' --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 \
    --lr 1e-3 2e-3 5e-4 --set training.bf16=false
halflife compare 'comba@state(mamba2)' --experiment post-taken-apart-text --scale small --seeds 1 --lr 4e-3 --set training.bf16=false
halflife compare 'mamba2@state(mamba2+ska)' --experiment post-taken-apart-text --scale small --seeds 1 --lr 8e-3 --set training.bf16=false
halflife compare 'mamba2@state(mamba2+ska)' --experiment post-taken-apart-text --scale small --seeds 3 --only-seeds 1 2 --lr 2e-3 \
    --set training.bf16=false
halflife compare mamba2+ska --experiment post-taken-apart-text --scale small --seeds 3 --lr 2e-3 --set training.bf16=false
halflife compare mamba2 tnl --experiment post-taken-apart-text --scale small --seeds 3 --lr 2e-3 --set training.bf16=false
halflife compare mamba2 --experiment post-taken-apart-text --scale small --seeds 3 --lr 4e-3 --set training.bf16=false
halflife compare 'gated_deltanet@state(gated_deltanet+gate_rank)' --experiment overview --scale small --seeds 3 --lr 0.01 \
    --output runs/overview_state
halflife compare 'gated_deltanet@state(gated_deltanet+gate_rank)' 'gated_deltanet@state(deltaproduct)' --experiment overview \
    --scale small --seeds 3 --tune-seeds 1 --lr 1e-2 3e-3 3e-2 --output runs/overview_states
halflife compare retnet+post --experiment overview --scale small --seeds 3 --tune-seeds 1 --output runs/overview_retnet
halflife compare retnet retnet+post hgrn2 fox llama mamba2+attention gated_deltanet+attention simple --experiment overview --scale small --seeds 5 \
    --only-seeds 3 4 --lr 0.003
halflife compare gated_deltanet+ska --experiment overview --scale small --seeds 5 --only-seeds 3 4 --lr 0.03
halflife compare gated_deltanet deltanet kda gdn2 comba mesa mamba2+ska gated_deltanet+gate_rank --experiment overview --scale small --seeds 5 --only-seeds 3 4 --lr 0.01
halflife compare retnet+post --experiment overview --scale small --seeds 3 --only-seeds 1 2 --lr 0.01
halflife compare deltaproduct --experiment overview --scale small --seeds 3 --only-seeds 1 2 --lr 0.003
halflife compare mamba3 --experiment overview --scale small --seeds 5 --tune-seeds 1 --output runs/overview_mamba3
halflife compare mamba3 --experiment overview --scale small --seeds 1 --lr 3e-4
halflife compare mamba3_mimo --experiment overview --scale small --seeds 3 --tune-seeds 1 --output runs/overview_mimo_chosen
halflife compare mamba2+post_released --experiment overview --scale small --seeds 5 --tune-seeds 1 --output runs/overview_released
python docs/overview.py runs/overview* runs/overview*/text
halflife compare gated_deltanet --experiment overview --scale small --seeds 3 --tune-seeds 1 --lr 1e-2 3e-3 3e-2 \
    --set mixer.allow_neg_eigval=true --output runs/overview_neg
halflife compare gated_deltanet --experiment overview --scale small --seeds 5 --only-seeds 3 4 --lr 3e-3 --set mixer.allow_neg_eigval=true
halflife compare deltaproduct --experiment overview --scale small --seeds 5 --only-seeds 3 4 --lr 1e-2
halflife compare gated_deltanet --experiment post-taken-apart-text --scale small --seeds 3 --tune-seeds 1 --lr 1e-3 2e-3 5e-4 \
    --set training.bf16=false --set mixer.allow_neg_eigval=true
halflife compare gated_deltanet --experiment post-taken-apart-text --scale small --seeds 1 --lr 4e-3 \
    --set training.bf16=false --set mixer.allow_neg_eigval=true
halflife compare mamba2 --experiment overview --scale small --seeds 3 --lr 3e-3 --set mixer.num_groups=4
halflife compare mamba3 --experiment overview --scale small --seeds 5 --tune-seeds 1 --set mixer.rate_floor=null
halflife compare mamba3 --experiment post-taken-apart-text --scale small --seeds 3 --lr 1e-3 --set training.bf16=false mixer.rate_floor=null
