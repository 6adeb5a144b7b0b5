# The commands that made the results of endpoints.md.

halflife compare mamba2 mamba2+post mamba2+post_optimal --task mqar --scale small --train-length 64 --pairs 4 8 16 16 --seeds 3 \
    --tune-seeds 1 --lr 0.003 0.001 0.01 --output runs/endpoints/rates
halflife compare mamba2 mamba2+post mamba2+post_optimal --resume runs/endpoints/rates --lr 0.03
halflife compare mamba2+post mamba2+post_optimal --task mqar --scale small --train-length 64 --pairs 4 8 16 16 --seeds 1 --lr 0.1
halflife compare mamba2 --task mqar --scale small --train-length 64 --pairs 4 8 16 16 --seeds 5 --lr 0.02
halflife compare mamba2+post --task mqar --scale small --train-length 64 --pairs 4 8 16 16 --seeds 5 --only-seeds 3 4 --lr 0.03
halflife compare mamba2+post --task mqar --scale small --train-length 64 --pairs 4 8 16 16 --seeds 3 --lr 0.03 --set post.stretch=false
halflife compare mamba2+post --task mqar --scale small --train-length 64 --pairs 4 8 16 16 --seeds 1 --lr 0.02
halflife compare mamba2+post --task mqar --scale small --train-length 64 --pairs 4 8 16 16 --seeds 1 --lr 0.01 --set post.stretch=false
halflife compare mamba2+post_released --task mqar --scale small --train-length 64 --pairs 4 8 16 16 --seeds 3 --tune-seeds 1 --lr 0.03 0.01 0.1
halflife compare mamba2+post_released --task mqar --scale small --train-length 64 --pairs 4 8 16 16 --seeds 5 --only-seeds 3 4 --lr 0.03
