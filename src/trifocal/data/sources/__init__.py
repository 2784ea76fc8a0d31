"""Sources of documents: each reads its shards from any cursor that it gave out."""
