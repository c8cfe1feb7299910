"""Programs as people write them, each with one line that makes it faster, or does not.

A program is a module with a generator function `run(device, record)`: an ordinary script whose loop yields after each step.
`record` stands at the one place where the line is: `pg.record`, the usual rival, or nothing. The first thing that is yielded is
what lives on (models, optimizers), compared at the end; then, after each step, what the step gave. `RIVAL` is the rival's name,
what stands for `record` then, and further arguments of `run`; `STEPS` are compared, `ROUND` are timed at a time.
"""

PROGRAMS = {
    "ppo": "PPO, acting and updating as functions",
    "ppo_tensordict": "PPO over containers of tensors",
    "sac": "SAC, three optimizers",
    "c51": "C51, a distributional DQN",
    "td3": "TD3, every second update another",
    "dreamer": "Dreamer's world model",
    "nanogpt": "GPT, accumulated gradients, evaluation",
    "gpt_sample": "GPT, sampled without a cache",
    "gpt_fast": "decoding with a cache in the model",
    "llama_generate": "transformers' generate, static cache",
    "bert": "BERT, fine-tuned",
    "mamba": "state-space model, sampled without a cache",
    "word_lm": "LSTM language model",
    "resnet": "ResNet, mixup and EMA",
    "airbench": "CIFAR speedrun",
    "mnist": "MNIST, as the example trains it",
    "amp": "transformer layers with a gradient scaler",
    "dit": "diffusion transformer, trained",
    "ddim": "diffusion, sampled",
    "vae": "VAE, annealed",
    "gan": "GAN, two optimizers",
    "flow": "normalising flow",
    "nerf": "radiance field",
    "pinn": "physics-informed network",
    "maml": "MAML, differentiated inner loop",
    "gnn": "graph network",
    "spiking": "spiking network",
}
