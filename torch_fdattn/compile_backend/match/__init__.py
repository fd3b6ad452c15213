"""First stage: recognises attention, whatever it was written as.

    attention            what a match yields
    sdpa                 calls of scaled_dot_product_attention
    unfused_attention    product, softmax, product: scores.py above the softmax, weights.py below it
    products, operands   matrix products as labels; q, k and v behind transposes, scalings and repeated heads
    unmatched            attention in no form of ours, which is reported (written_softmax.py: softmax by exp)
    opaque               calls that hold an attention inside

A form is a module or object with FORM, its name in reports, and `match(node, masks)`.
"""
