// Kernels of a training step on a CPU, called from Python through ctypes.
#include "attention.h"
#include "feedforward.h"
#include "pairs.h"

extern "C" {

void glass_feed(const FeedForward* feed, int32_t backward) {
    if (backward) feed_backward(*feed);
    else feed_forward(*feed);
}

void glass_attention(const Task* task, int32_t backward) {
    if (task->is_bf16) attention<bf16>(*task, backward);
    else attention<float>(*task, backward);
}

int64_t glass_sizes(int32_t what) {
    const int64_t sizes[] = {sizeof(Task), sizeof(FeedForward)};
    return sizes[what];
}
}
