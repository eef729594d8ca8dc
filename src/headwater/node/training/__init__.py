"""Training on a node. The one part of `node` that needs torch: nothing else imports it before such a job arrives."""
