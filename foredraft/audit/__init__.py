"""Is speculation lossless here? Evidence that anyone can produce, for any model and server.

==============  ================================================================================
`statistics`    martingale tests of tokens against the laws that they were to be drawn from
`levels`        what was looked at, with a verdict each, and the verdict of all
`plain`         the plain law: texts scored again in one forward, without drafts
`faults`        known mistakes, planted to see whether the audit would find them
`own`           the audit of an `LLM`
`servers`       the audit of another server
`options`       how large an audit is
`report`        JSON and Markdown
==============  ================================================================================
"""
