# The commands that made the results of echo.md.

halflife compare {K0,K1,K2,learned,ridge-conv,attention,gated_deltanet}:{h1,h4,l3} h4-none h4-masked h4-mixed {K1,K2,K8}:h9 \
    {K1,K2,learned,ridge-conv,attention,gated_deltanet}:{h2,l9} {learned,ridge-conv,attention,gated_deltanet}:h9 \
    --experiment koopman-powers --scale smoke --steps 1800 --seeds 3 --tune-seeds 1
halflife compare attention:h9 gated_deltanet:l9 --experiment koopman-powers --scale smoke --steps 1800 --seeds 1 --lr 1e-3
halflife compare {ridge-conv,gated_deltanet}:h9 --experiment koopman-powers --scale smoke --steps 3600 --seeds 3 --tune-seeds 1 --lr 0.01 0.003 0.03
halflife compare attention:h9 --experiment koopman-powers --scale smoke --steps 3600 --seeds 3 --tune-seeds 1 --lr 0.003 0.001 0.01
halflife compare gated_deltanet:h4 --experiment koopman-powers --scale smoke --steps 1800 --seeds 3 --only-seeds 0 --lr 1e-3
halflife compare gated_deltanet:h4 --experiment koopman-powers --scale smoke --steps 1800 --seeds 3 --only-seeds 1 2 --lr 1e-2
halflife compare 'gated_deltanet:h4@state(K1:h4)' 'gated_deltanet:h1@state(K1:h1)' 'gated_deltanet:h4-none@state(K1:h4-none)' \
    'gated_deltanet:l3@state(K1:l3)' --experiment koopman-powers --scale smoke --steps 1800 --seeds 3 --tune-seeds 1

halflife compare K2:h4 K2:h1 --experiment koopman-powers --scale smoke --steps 1800 --seeds 3 --tune-seeds 1 --lr 3e-3 1e-2 3e-2 \
    --set training.by_token=true ska.decode_refresh=token

halflife compare --experiment echo-mqar --scale small --seeds 3
halflife compare mamba2+ska:K1 mamba2:equal-state --experiment echo-mqar --scale small --steps 4000 --seeds 3 --tune-seeds 1 --lr 3e-3 1e-2 3e-2
halflife compare --experiment echo-ablations --scale small
halflife compare --experiment mqar-updates --scale smoke --seeds 3 --tune-seeds 1

halflife compare mamba2+ska:K1 mamba2 mamba2+attention --experiment echo-transfer --scale small --seeds 3
halflife compare mamba2+attention mamba2+ska gated_deltanet mamba2 'gated_deltanet@state(mamba2+ska)' 'mamba2@state(mamba2+ska)' \
    --task mqar sysprompt tooltrace --scale small --num-layers 2 --batch-size 64 \
    --warm-length 32 --warm-pairs 1 4 --pairs 1 4 8 --lengths 64 256 1024 --test-pairs 1 4 8 --test-tokens 65536 \
    --test-tasks mqar sysprompt tooltrace niah multihop commonword --seeds 3 --tune-seeds 1 --lr 3e-3 1e-3 1e-2
halflife compare mamba3_echo --task mqar sysprompt tooltrace --scale small --num-layers 2 --batch-size 64 \
    --warm-length 32 --warm-pairs 1 4 --pairs 1 4 8 --lengths 64 256 1024 --test-pairs 1 4 8 --test-tokens 65536 \
    --test-tasks mqar sysprompt tooltrace niah multihop commonword --seeds 1 --lr 3e-3 1e-3 1e-2
halflife compare mamba2+attention gated_deltanet --task mqar sysprompt tooltrace --scale small --num-layers 2 --batch-size 64 \
    --warm-length 32 --warm-pairs 1 4 --pairs 1 4 8 --lengths 64 256 1024 --test-pairs 1 4 8 --test-tokens 65536 \
    --test-tasks mqar sysprompt tooltrace niah multihop commonword --seeds 1 --lr 3e-4
halflife compare mamba2+ska --task mqar sysprompt tooltrace --scale small --num-layers 2 --batch-size 64 --warm-length 32 --warm-pairs 1 4 \
    --pairs 1 4 8 --lengths 64 256 1024 --test-pairs 1 4 8 --test-tokens 65536 --test-tasks mqar sysprompt tooltrace niah multihop commonword \
    --seeds 3 --tune-seeds 1 --lr 3e-3 1e-3 1e-2 --set training.action_mask=true
halflife compare mamba3_echo --task mqar sysprompt tooltrace --scale small --num-layers 2 --batch-size 64 --steps 6000 \
    --warm-length 32 --warm-pairs 1 4 --pairs 1 4 8 --lengths 64 256 1024 --test-pairs 1 4 8 --test-tokens 65536 \
    --test-tasks mqar sysprompt tooltrace niah multihop commonword --seeds 3 --tune-seeds 1 --lr 3e-3 1e-3 1e-2
halflife compare mamba3_echo+ska_paper mamba3_echo+attention --experiment echo-transfer --scale paper --seeds 3 --only-seeds 0 \
    --lr 1e-3 3e-3 3e-4 --warm-length 24 --test-pairs 1 4 8 --test-examples 128 --test-tokens 32768

halflife compare mamba3:amnesia-cot_easy cg-ska-1.5:amnesia-cot_easy --experiment echo-tiers --scale paper --seeds 3 --steps 2000 --tune-seeds 1 --lr 1e-4 3e-4 1e-3
halflife compare mamba3:amnesia-cot_hard cg-ska-1.5:amnesia-cot_hard --experiment echo-tiers --scale paper --seeds 3 --steps 2000 --tune-seeds 1 --lr 1e-3 3e-4 1e-4
halflife compare cg-ska-2.5:amnesia-cot_easy --experiment echo-tiers --scale paper --seeds 3 --steps 2000 --tune-seeds 1 --lr 3e-4 1e-3 1e-4
halflife compare mamba3:amnesia-recall_easy cg-ska-1.5:amnesia-recall_easy --experiment echo-tiers --scale paper --seeds 3 --steps 2000 --tune-seeds 1 --lr 3e-4 1e-3 1e-4
halflife compare mamba3:amnesia-recall_hard cg-ska-1.5:amnesia-recall_hard --experiment echo-tiers --scale paper --seeds 3 --steps 2000 --tune-seeds 1 --lr 3e-4 1e-3 1e-4
halflife compare mamba3:toolcalling-easy cg-ska-1.5:toolcalling-easy --experiment echo-tiers --scale paper --seeds 3 --tune-seeds 1 --lr 3e-4 1e-3 1e-4
halflife compare mamba3:toolcalling-hard cg-ska-1.5:toolcalling-hard --experiment echo-tiers --scale paper --seeds 3 --lr 3e-4
halflife compare mamba3:economy-easy cg-ska-1.5:economy-easy --experiment echo-tiers --scale paper --seeds 3 --tune-seeds 1 --lr 3e-4 1e-3 1e-4
halflife compare cg-ska-1.5:amnesia-cot_easy cg-ska-2.5:amnesia-cot_easy --experiment echo-tiers --scale paper --seeds 3 --steps 750
halflife compare mamba3:amnesia-cot_easy --experiment echo-tiers --scale paper --seeds 3 --steps 750 --set mixer.state_size=34
halflife compare mamba3:amnesia-cot_easy --experiment echo-tiers --scale paper --seeds 1 --steps 2000 --lr 1e-3
halflife compare cg-ska-1.5-gated:amnesia-cot_easy cg-ska-1.5-token:amnesia-cot_easy ska-1.5:amnesia-cot_easy ska-1.5-shared:amnesia-cot_easy \
    --experiment echo-tiers --scale paper --seeds 3 --steps 2000 --tune-seeds 1 --lr 3e-4 1e-3 1e-4
halflife compare ska-1.5:amnesia-cot_easy --experiment echo-tiers --scale paper --seeds 3 --steps 2000 --lr 1e-3 --set ska.rank=16
