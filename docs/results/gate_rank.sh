# The commands that made the results of gate_rank.md.

halflife compare mamba2 mamba2+gate_rank 'mamba2@state(mamba2+gate_rank)' gated_deltanet gated_deltanet+gate_rank \
    'gated_deltanet@state(gated_deltanet+gate_rank)' --experiment gate-rank-mqar --scale smoke --seeds 3 --tune-seeds 1 \
    --lr 3e-3 1e-2 3e-2
halflife compare mamba2 'mamba2@state(mamba2+gate_rank)' --experiment gate-rank-mqar --scale smoke --seeds 5 --only-seeds 3 4 --lr 3e-2
halflife compare mamba2+gate_rank gated_deltanet+gate_rank --experiment gate-rank-mqar --scale smoke --seeds 5 --only-seeds 3 4 --lr 1e-2
halflife compare gated_deltanet --experiment gate-rank-mqar --scale smoke --seeds 5 --only-seeds 3 4 --lr 3e-2
halflife compare 'gated_deltanet@state(gated_deltanet+gate_rank)' --experiment gate-rank-mqar --scale smoke --seeds 5 --only-seeds 3 4 --lr 3e-3
halflife compare mamba2 'mamba2@state(mamba2+gate_rank)' gated_deltanet --experiment gate-rank-mqar --scale smoke --seeds 1 --lr 1e-1
halflife compare 'gated_deltanet@state(gated_deltanet+gate_rank)' --experiment gate-rank-mqar --scale smoke --seeds 1 --lr 1e-3
halflife compare mamba2 mamba2+gate_rank 'mamba2@state(mamba2+gate_rank)' 'mamba2@parameters(mamba2+gate_rank)' \
    gated_deltanet gated_deltanet+gate_rank 'gated_deltanet@state(gated_deltanet+gate_rank)' \
    'gated_deltanet@parameters(gated_deltanet+gate_rank)' --experiment gate-rank-niah --scale small --seeds 3 \
    --lr 3e-3 1e-2 3e-2
halflife compare mamba2 mamba2+gate_rank 'mamba2@parameters(mamba2+gate_rank)' gated_deltanet gated_deltanet+gate_rank \
    'gated_deltanet@state(gated_deltanet+gate_rank)' 'gated_deltanet@parameters(gated_deltanet+gate_rank)' \
    --experiment gate-rank-niah --scale small --seeds 5 --only-seeds 3 4 --lr 1e-2
halflife compare 'mamba2@state(mamba2+gate_rank)' --experiment gate-rank-niah --scale small --seeds 5 --only-seeds 3 4 --lr 3e-2

halflife compare mamba2 mamba2+gate_rank mamba2+gate_rank:closed mamba2+gate_rank:untrained mamba2+gate_rank:reset2 \
    mamba2+gate_rank:reset50 gated_deltanet gated_deltanet+gate_rank gated_deltanet+gate_rank:closed \
    gated_deltanet+gate_rank:untrained gated_deltanet+gate_rank:reset2 gated_deltanet+gate_rank:reset50 \
    --experiment gate-rank-niah --scale small --seeds 3 --tune-seeds 1 --lr 3e-3 1e-2 3e-2
halflife compare mamba2 mamba2+gate_rank mamba2+gate_rank:closed mamba2+gate_rank:untrained gated_deltanet gated_deltanet+gate_rank \
    gated_deltanet+gate_rank:closed gated_deltanet+gate_rank:untrained --experiment gate-rank-mqar --scale smoke --seeds 3 \
    --tune-seeds 1 --lr 3e-3 1e-2 3e-2
halflife compare mamba2+gate_rank gated_deltanet+gate_rank --experiment gate-rank-mqar --scale smoke --seeds 3 --lr 1e-2
halflife compare mamba2+gate_rank gated_deltanet+gate_rank --experiment gate-rank-niah --scale small --seeds 3 --lr 1e-2

halflife compare --experiment gate-rank-s5 --scale small --seeds 3
halflife compare mamba2 mamba2+gate_rank gated_deltanet gated_deltanet+gate_rank --experiment gate-rank-s5 --scale paper --seeds 3 \
    --tune-seeds 1 --lr 1e-3 3e-3 1e-2
halflife compare mamba2 mamba2+gate_rank gated_deltanet gated_deltanet+gate_rank gated_deltanet:neg \
    gated_deltanet+gate_rank:neg --experiment gate-rank-s5 --words swaps --scale small --steps 2000 --seeds 3
halflife compare gated_deltanet:neg gated_deltanet+gate_rank:neg 'gated_deltanet:neg@state(gated_deltanet+gate_rank:neg)' \
    --experiment gate-rank-s5 --words swaps --scale paper --hidden-size 64 --steps 2000 --set training.bf16=false --seeds 5 --tune-seeds 1 \
    --lr 1e-3 3e-3 1e-2
halflife compare gated_deltanet:neg gated_deltanet+gate_rank:neg --experiment gate-rank-s5 --words swaps --scale paper --hidden-size 64 \
    --steps 2000 --set training.bf16=false --seeds 1 --lr 3e-2
halflife compare gated_deltanet:neg gated_deltanet+gate_rank:neg --experiment gate-rank-s5 --words swaps --scale paper --hidden-size 64 \
    --steps 2000 --set training.bf16=false --seeds 5 --lr 3e-3
halflife compare deltaproduct:n4-swaps --experiment gate-rank-s5 --scale small --steps 8000 --seeds 3 --tune-seeds 1 --lr 1e-2 3e-3 3e-2
halflife compare deltaproduct:n4 --experiment gate-rank-s5 --scale small --steps 8000 --lr 3e-2
halflife compare gated_deltanet:neg-d2-swaps gated_deltanet:neg-d4-swaps --experiment gate-rank-s5 --scale small --steps 8000 --lr 1e-2 3e-3 3e-2
halflife compare gated_deltanet:neg-d2-swaps --experiment gate-rank-s5 --scale small --steps 8000 --hidden-size 128 --lr 1e-2 3e-3 3e-2
halflife compare gated_deltanet:neg-d2-swaps --experiment gate-rank-s5 --scale small --steps 8000 --hidden-size 256 --lr 3e-3 1e-2
halflife compare gated_deltanet gated_deltanet:neg deltaproduct --experiment gate-rank-s5 --group s3 --scale small --steps 2000 \
    --seeds 3 --tune-seeds 1 --lr 3e-3 1e-2 3e-2
halflife compare gated_deltanet gated_deltanet:neg --resume FOLDER --lr 0.1
halflife compare --experiment gate-rank-s5 --group z2 --scale small --steps 600 --seeds 3
