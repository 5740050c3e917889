"""Bugs of norms, activations, the residual stream and modes."""

import torch
import torch.nn.functional as F
from torch import nn

from tests.bugs.base import MLP, Attention, Block, Config, LayerNorm, RMSNorm
from tests.bugs.base_decoder import Decoder
from tests.bugs.bug import plant, spelled_hf
from tests.bugs.zoo_attention import ROTARY

# norm_placement, norm_eps, norm_axis


class NormedResidual(Block):
    def forward(self, x, around, cache=None):
        x = self.norm1(x)
        x = x + self.attention(x, around, cache)
        return x + self.mlp(self.norm2(x))


class PostBlock(Block):
    def forward(self, x, around, cache=None):
        x = self.norm1(x + self.attention(x, around, cache))
        return self.norm2(x + self.mlp(x))


class UnnormedMLP(Block):
    def forward(self, x, around, cache=None):
        x = x + self.attention(self.norm1(x), around, cache)
        return x + self.mlp(x)


def skip_final_norm(model: nn.Module) -> None:
    """The norm is there and is a parameter; it is never called."""
    model.final_norm, model.norm = model.norm, nn.Identity()


def eps_everywhere(eps: float):
    def tamper(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, LayerNorm | RMSNorm):
                module.eps = eps

    return tamper


class UnbiasedNorm(LayerNorm):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(x.var(-1, keepdim=True) + self.eps) * self.weight + self.bias


class EpsOutside(LayerNorm):
    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return centred / (x.std(-1, keepdim=True, correction=0) + self.eps) * self.weight + self.bias


class NormOverTime(LayerNorm):
    def forward(self, x):
        centred = x - x.mean((-2, -1), keepdim=True)
        return centred * torch.rsqrt(x.var((-2, -1), keepdim=True, correction=0) + self.eps) * self.weight + self.bias


class NormOverBatch(RMSNorm):
    def forward(self, x):
        return x * torch.rsqrt(x.square().mean((0, -1), keepdim=True) + self.eps) * self.weight


NORMS = (
    plant(
        *("eps_1e_3_hf", "norm_eps", "rms_norm_eps is 1e-5 in a config like Hugging Face's, 1e-3 is used"),
        ROTARY,
        tamper=eps_everywhere(1e-3),
        dress=spelled_hf,
        catalogue=(69,),
    ),
    plant(
        *("residual_from_norm", "norm_placement", "the residual of layer 1 starts from the normed input"),
        at={"blocks.1": NormedResidual},
        layer=1,
        catalogue=(67,),
        also=("residual_growth",),
    ),
    plant(
        *("final_norm_skipped", "norm_placement", "the final norm is never called"),
        ROTARY,
        tamper=skip_final_norm,
        also=("dead_gradient", "init_loss"),
        catalogue=(68,),
    ),
    plant(
        *("post_for_pre", "norm_placement", "pre-norm is declared, norms stand after the sums"),
        at={"blocks.?": PostBlock},
    ),
    plant(
        *("mlp_not_normed", "norm_placement", "the MLP of layer 2 reads the stream without its norm"),
        ROTARY,
        at={"blocks.2": UnnormedMLP},
        layer=2,
        also=("dead_gradient",),
    ),
    plant(*("eps_1e_12", "norm_eps", "1e-5 is declared, 1e-12 is used"), tamper=eps_everywhere(1e-12), catalogue=(69,)),
    plant(
        *("eps_1e_3", "norm_eps", "1e-5 is declared, 1e-3 is used"),
        ROTARY,
        tamper=eps_everywhere(1e-3),
        catalogue=(69,),
    ),
    plant(
        *("unbiased_variance", "norm_eps", "the variance is divided by D - 1"),
        at={"blocks.*.norm?": UnbiasedNorm},
        catalogue=(70,),
    ),
    plant(
        *("eps_outside", "norm_eps", "eps is added to the deviation, outside the root"),
        at={"*norm*": EpsOutside},
        catalogue=(70,),
    ),
    plant(
        *("norm_over_time", "norm_axis", "a norm of layer 1 takes its statistics over time"),
        at={"blocks.1.norm1": NormOverTime},
        layer=1,
        also=("causal_leak",),
        catalogue=(13,),
    ),
    plant(
        *("norm_over_batch", "norm_axis", "a norm of layer 0 takes its statistics over the batch"),
        ROTARY,
        at={"blocks.0.norm2": NormOverBatch},
        layer=0,
        also=("batch_variance",),
        catalogue=(13,),
    ),
)


# activation, residual_growth


class ExactGelu(MLP):
    def activate(self, x):
        return F.gelu(x)


class ReluGate(MLP):
    def activate(self, x):
        return F.relu(x)


class NoActivation(MLP):
    def activate(self, x):
        return x


@torch.no_grad()
def loud_layer(model: nn.Module) -> None:
    model.blocks[1].mlp.down.weight.mul_(60)


@torch.no_grad()
def unscaled_init(model: nn.Module) -> None:
    for block in model.blocks:
        for projection in (block.attention.out_proj, block.mlp.down):
            projection.weight.mul_((2 * model.config.n_layers) ** 0.5)


STREAM = (
    plant(
        *("exact_gelu_hf", "activation", "gelu_new is declared as Hugging Face spells it, exact GELU is used"),
        Config(activation="gelu_tanh"),
        at={"blocks.*.mlp": ExactGelu},
        dress=spelled_hf,
        catalogue=(71,),
    ),
    plant(
        *("exact_gelu_one_layer", "activation", "tanh GELU is declared, layer 2 uses the exact one"),
        Config(activation="gelu_tanh"),
        at={"blocks.2.mlp": ExactGelu},
        layer=2,
        catalogue=(71,),
    ),
    plant(
        *("relu_gate", "activation", "SwiGLU is declared, the gate is a ReLU"), ROTARY, at={"blocks.*.mlp": ReluGate}
    ),
    plant(
        *("activation_missing", "activation", "layer 0 has no activation"), at={"blocks.0.mlp": NoActivation}, layer=0
    ),
    plant(
        *("loud_layer", "residual_growth", "the MLP of layer 1 starts sixty times too loud"),
        tamper=loud_layer,
        layer=1,
    ),
    plant(
        *("unscaled_init", "residual_growth", "residual projections start without 1/sqrt(2 layers)"),
        Config(n_layers=4),
        tamper=unscaled_init,
        catalogue=(72,),
        special="declared",
    ),
)


# eval_stochastic


class DropsInEval(Block):
    rate = 0.1

    def forward(self, x, around, cache=None):
        return F.dropout(super().forward(x, around, cache), self.rate)


class DropsFaintly(Attention):
    def normalise(self, scores):
        return F.dropout(super().normalise(scores), 0.005)


class DropsInKernel(Attention):
    def kernel(self, q, k, v, allowed, bias):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=allowed, dropout_p=0.1, scale=self.scale)


class NeverDropsAgain(Decoder):
    def train(self, mode=True):
        if not mode:
            for module in self.modules():
                if isinstance(module, nn.Dropout):
                    module.p = 0.0
        return super().train(mode)


MODES = (
    plant(
        *("drops_in_eval", "eval_stochastic", "layer 1 drops in evaluation too"), at={"blocks.1": DropsInEval}, layer=1
    ),
    plant(
        *("drops_faintly", "eval_stochastic", "layer 2 drops 0.5% of its attention weights in evaluation"),
        ROTARY,
        at={"blocks.2.attention": DropsFaintly},
        layer=2,
    ),
    plant(
        *("drops_in_kernel", "eval_stochastic", "dropout_p is handed to the fused kernel in evaluation"),
        Config(fused=True, dropout=0.1, position="rotary"),
        at={"blocks.*.attention": DropsInKernel},
        catalogue=(65,),
    ),
    plant(
        *("never_drops_again", "eval_stochastic", "after the first eval() training never drops again"),
        Config(dropout=0.2),
        at={"": NeverDropsAgain},
        catalogue=(66,),
        special="train",
    ),
)

BUGS = NORMS + STREAM + MODES
