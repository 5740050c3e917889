// Feed-forwards, and mixtures of them: which experts compute which tokens, and how threads divide that.
//
// The tokens of an expert are a run of pairs (token, expert), ordered by expert; the shared expert computes all tokens. A run is a
// matmul of `count` vectors. The chunks of all runs are one list of tasks that the threads take in turn, so that a few runs of
// one vector (decoding) and a hundred runs of many (prompts) keep them equally busy. Phases, with a barrier after each:
//   router      logits of chunks of experts, of all tokens (Step::mix)
//   choose      the experts of a thread's share of the tokens; then one thread alone orders the pairs (distribute)
//   gather      the inputs of a run in the form of its matrix
//   first       tasks of up and gate, and the activation: some columns of `hidden`, of the pairs of a run
//   convert     the hidden layer of a run in the form of its matrix
//   second      tasks of down: some columns of `outputs`
//   sum         outputs times gates, of a thread's columns or of its share of the tokens
#pragma once
#include "model.h"
#include "schedule.h"

namespace glass {

// A chunk of the hidden layer: `up` and, if there is a gate, `gate` are projected and become the activations.
inline void multiply_up(const FeedForward& feed, const Chunk& chunk, const float* x, long pitch, const Vectors& v, float* hidden,
                        float* gates, long stride) {
    const bool gated = feed.gate.rows;
    multiply(feed.up, chunk, x, pitch, v, hidden, stride);
    if (gated) multiply(feed.gate, chunk, x, pitch, v, gates, stride);
    const int n = chunk.last - chunk.first;
    for (int b = chunk.from * v.tile; b < std::min(chunk.to * v.tile, v.batch); b++) {
        float *up = hidden + b * stride + chunk.first, *gate = gated ? gates + b * stride + chunk.first : up;
        if (gated && feed.limit > 0)
            for (int i = 0; i < n; i++) {
                up[i] = std::min(std::max(up[i], -feed.limit), feed.limit);
                gate[i] = std::min(gate[i], feed.limit);
            }
        activate(feed.activation, gate, n);
        if (gated)
            for (int i = 0; i < n; i++) up[i] = (up[i] + feed.up_offset) * gate[i];
    }
}

struct Mixture {
    struct Run {
        int expert, first, count;  // its pairs: first..first + count
        int gathered;              // where its vectors are copied to, if its matrix reads them as they are
        int tasks[2];              // one more than its last task of the first and of the second matmul
    };
    enum { FIRST, SECOND };
    std::vector<float> scores, weights;        // (tokens, experts), (tokens, slots): what an output is multiplied with
    std::vector<int32_t> choice, pair, token;  // (tokens, slots): expert, and its pair; by pair: its token
    Rows gathered, hidden, gates, outputs;     // (vectors, pitch), (pairs, hidden_pitch) twice, (pairs, pitch)
    std::vector<Run> runs;
    std::vector<Vectors> sets;  // by run: the input of its next matmul
    long pitch = 0, hidden_pitch = 0;

    static int slots(const Experts& e) { return e.active + e.has_shared; }  // experts of a token
    long bytes() const {
        long words = gathered.held.size() + hidden.held.size() + gates.held.size() + outputs.held.size();
        for (const Vectors& v : sets) words += v.words.size();
        return 4 * words;
    }

    // Make room for the mixture of a layer. All experts but the shared one have the same sizes.
    void shape(const Experts& e, int tokens, long pitch_) {
        const long pairs = (long)tokens * slots(e);
        long widest = 0;
        bool gated = false;
        for (int i : {0, e.has_shared ? e.count : 0})
            widest = std::max(widest, padded_stride(e.expert[i].up.rows)), gated |= e.expert[i].gate.rows > 0;
        pitch = pitch_, hidden_pitch = std::max(hidden_pitch, widest);
        need(scores, (long)tokens * e.count), need(weights, pairs), need(choice, pairs), need(pair, pairs), need(token, pairs);
        hidden.need(pairs * hidden_pitch), outputs.need(pairs * pitch);
        if (gated) gates.need(pairs * hidden_pitch);
    }

    // The experts of one token, from the logits of the router, which become scores.
    void choose(const Experts& e, int b, const float* x, int columns) {
        const int E = e.count, each = E / e.groups;
        float *score = &scores[(long)b * E], *weight = &weights[(long)b * slots(e)];
        int32_t* chosen = &choice[(long)b * slots(e)];
        if (e.score == SIGMOID) {
            apply(score, E, [](floats v) { return 1 / (1 + exponential(-v)); });
        } else {
            const float inverse = 1 / softmax_numerators(score, E, 1);
            for (int i = 0; i < E; i++) score[i] *= inverse;
        }
        static thread_local std::vector<float> ranking, best;
        ranking.assign(score, score + E), best.resize(e.groups);
        for (int i = 0; e.correction && i < E; i++) ranking[i] += e.correction[i];
        for (int g = 0; e.groups > 1 && g < e.groups; g++) best[g] = group_score(&ranking[g * each], each, e.group_score);
        for (int n = e.groups; n > e.top_groups; n--) {  // leave out the worst group; of equal ones the last
            int worst = 0;
            for (int g = 1; g < e.groups; g++)
                if (best[g] <= best[worst]) worst = g;
            std::fill_n(&ranking[worst * each], each, -INFINITY), best[worst] = INFINITY;
        }
        float sum = 0;
        for (int a = 0; a < e.active; a++) {  // of equal ones the first; comparisons with NaN are false
            int top = 0;
            for (int i = 1; i < E; i++)
                if (ranking[i] > ranking[top]) top = i;
            chosen[a] = top, weight[a] = score[top], sum += score[top], ranking[top] = -INFINITY;
        }
        for (int a = 0; a < e.active; a++) weight[a] = (e.normalize ? weight[a] / sum : weight[a]) * e.scale;
        if (!e.has_shared) return;
        const bool has_gate = e.shared_gate.rows;
        chosen[e.active] = E, weight[e.active] = 1;
        if (has_gate) weight[e.active] = 1 / (1 + std::exp(-dot(x, (const float*)e.shared_gate.weights, columns)));
    }

    // Order the pairs of all tokens by expert and count the tasks; one thread does this.
    void distribute(const Experts& e, int tokens, int threads) {
        const int all = e.count + e.has_shared, pairs = tokens * slots(e);
        std::vector<int> next(all + 1);
        for (int i = 0; i < pairs; i++) next[choice[i] + 1]++;
        for (int i = 0; i < all; i++) next[i + 1] += next[i];
        runs.clear();
        Run run{};
        for (run.expert = 0; run.expert < all; run.expert++, run.first += run.count) {
            const FeedForward& feed = e.expert[run.expert];
            run.count = next[run.expert + 1] - run.first;
            if (!run.count) continue;
            run.tasks[FIRST] += tasks_of(feed.up, run.count, threads), run.tasks[SECOND] += tasks_of(feed.down, run.count, threads);
            runs.push_back(run);
            if (!converts(feed.up, run.count)) run.gathered += run.count;
        }
        for (int i = 0; i < pairs; i++) pair[i] = next[choice[i]]++, token[pair[i]] = i / slots(e);
        gathered.need(run.gathered * pitch), need(sets, (long)runs.size());
    }

    void gather(const Experts& e, std::atomic<int>& taken, const float* x, int columns) {
        for_runs(taken, [&](const Run& run, Vectors& v) {
            const Matrix& up = e.expert[run.expert].up;
            const int32_t* tokens = &token[run.first];
            v.shape(up, run.count, converts(up, run.count));
            if (converts(up, run.count)) return v.pack(x, pitch, 0, 1, tokens);
            for (int i = 0; i < run.count; i++)
                std::memcpy(gathered.at + (run.gathered + i) * pitch, x + tokens[i] * pitch, columns * sizeof(float));
        });
    }

    void multiply_first(const Experts& e, std::atomic<int>& taken, int threads) {
        for_tasks(e, FIRST, taken, threads, [&](const Run& run, const Vectors& v, const Chunk& chunk) {
            const long at = run.first * hidden_pitch;
            multiply_up(e.expert[run.expert], chunk, gathered.at + run.gathered * pitch, pitch, v, hidden.at + at, gates.at + at, hidden_pitch);
        });
    }

    void convert_hidden(const Experts& e, std::atomic<int>& taken) {
        for_runs(taken, [&](const Run& run, Vectors& v) {
            const Matrix& down = e.expert[run.expert].down;
            v.shape(down, run.count, converts(down, run.count));
            if (converts(down, run.count)) v.pack(hidden.at + run.first * hidden_pitch, hidden_pitch, 0, 1);
        });
    }

    void multiply_second(const Experts& e, std::atomic<int>& taken, int threads) {
        for_tasks(e, SECOND, taken, threads, [&](const Run& run, const Vectors& v, const Chunk& chunk) {
            multiply(e.expert[run.expert].down, chunk, hidden.at + run.first * hidden_pitch, hidden_pitch, v, outputs.at + run.first * pitch,
                     pitch);
        });
    }

    void sum(const Experts& e, int b, int from, int to, float* y) const {  // columns of token b, in the order of its choice
        for (int a = 0; a < slots(e); a++) {
            const float weight = weights[b * slots(e) + a], *output = outputs.at + pair[b * slots(e) + a] * pitch;
            for (int i = from; i < to; i++) y[i] = (a ? y[i] : 0) + weight * output[i];
        }
    }

private:
    template <class T>
    static void need(std::vector<T>& held, long n) {
        if ((long)held.size() < n) held.resize(n);
    }

    static int tasks_of(const Matrix& w, int batch, int threads) {
        const int rows = rows_per_chunk(w, batch, threads);
        return (w.rows + rows - 1) / rows;
    }

    static float group_score(const float* ranking, int n, int kind) {
        float first = -INFINITY, second = -INFINITY;
        for (int i = 0; i < n; i++)
            if (ranking[i] > first) second = first, first = ranking[i];
            else if (ranking[i] > second) second = ranking[i];
        return kind == SUM_OF_TWO ? first + second : first;
    }

    // work(run, its set) for all runs, by all threads; `taken`: how many were taken.
    template <class F>
    void for_runs(std::atomic<int>& taken, F work) {
        for (int i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < (int)runs.size();) work(runs[i], sets[i]);
    }

    // work(run, its set, chunk) for all tasks of one of the two matmuls, by all threads.
    template <class F>
    void for_tasks(const Experts& e, int which, std::atomic<int>& taken, int threads, F work) {
        int r = 0, begin = 0;  // a thread gets tasks in order, so that the run of its next one is this one or a later one
        for (int i; (i = taken.fetch_add(1, std::memory_order_relaxed)) < runs.back().tasks[which];) {
            while (i >= runs[r].tasks[which]) begin = runs[r++].tasks[which];
            const FeedForward& feed = e.expert[runs[r].expert];
            const Matrix& w = which == FIRST ? feed.up : feed.down;
            const int rows = rows_per_chunk(w, runs[r].count, threads), first = (i - begin) * rows, ahead = first + threads * rows;
            work(runs[r], sets[r], Chunk{first, std::min(first + rows, w.rows), 0, sets[r].tiles, ahead < w.rows ? ahead : 0});
        }
    }
};

}  // namespace glass
