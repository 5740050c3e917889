"""ONNX, the format of onnxruntime. A model becomes a folder with the files and the inputs that `optimum` also has.

| model | files | inputs |
|---|---|---|
| decoder | `model.onnx` | `input_ids`, `attention_mask`, `position_ids`, `past_key_values.N.key`, `.value` |
| encoder | `model.onnx` | `input_ids`, `attention_mask`, and `token_type_ids` if it has segments |
| encoder-decoder | `encoder_model.onnx` | `input_ids`, `attention_mask` |
| | `decoder_model.onnx` | `input_ids`, `encoder_attention_mask`, `past_key_values.N.decoder.key`, `.encoder.key`, … |

The encoder of an encoder-decoder also returns the keys and values of cross-attention, which its decoder reads. Batch
and lengths are dynamic, and the past may be empty. Weights are float32.
"""
