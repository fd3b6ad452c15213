"""A text for perplexities: written for these tests, so that no model has learned it by heart."""

TEXT = """\
The lighthouse at the end of the northern pier was built in the spring of 1871, when the harbour still \
sent forty boats a day to the herring grounds. Its first keeper, a retired cooper named Anders Holm, \
kept a diary for twenty-six years, and most of what we know about the town in those days comes from it. \
He wrote about the weather every morning before breakfast, and about his neighbours every evening after \
supper, and he was rarely kind to either.

On the third of March he notes that the wind turned to the east during the night and that ice had formed \
on the inside of the windows. The oil in the lamp had grown so thick that he had to warm it over the stove \
before it would climb the wick. Two boats had stayed out. He sat up until four in the morning, trimming the \
flame and listening for the bell on the outer buoy, and when the first of the boats came in at dawn he went \
down to the quay himself to count the men as they climbed the ladder. There were five of them, and there \
should have been six.

It is easy to forget how much work it took to keep a light burning. A lamp of that size used about two \
gallons of oil on a winter night, and every drop had to be carried up the ninety-two steps of the tower. \
The lens was cleaned each morning with spirits of wine and a soft leather, the brass was polished, the \
clockwork that turned the mirror was wound every four hours, and the soot was wiped from the glass whenever \
the flame had smoked. If the keeper slept, the mirror stopped, and from the sea a light that does not turn is \
a different light, which stands on a different rock, thirty miles to the south.

When electricity came to the pier, in 1924, the work of a night was reduced to the turning of a switch. The \
grandson of Anders Holm was the keeper then. He had a telephone, a bicycle and a wireless set, and he \
complained to the harbour board that there was nothing left for him to do. The board answered, in a letter \
that is still kept in the museum, that this had been the purpose of the investment. Eleven years later the \
light was made automatic, and the last keeper moved to a small house behind the church, from which, as he \
used to tell the children who visited him, one could see the beam pass over the roofs every nine seconds, \
exactly as it should.
"""
