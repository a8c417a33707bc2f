/* Says of every graph on its standard input whether the reader in C takes it, and why not.
 *
 * Before each graph stands its length, 4 bytes, little-endian. The answer is a line: "taken", or the
 * reason. Of a graph that is taken everything is read, so that a sanitizer sees every byte. */
#include "hetpipe_graph.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static double sum; /* of all that is read, so that no compiler leaves it out */

static void walk_text(const char *text)
{
    sum += text ? (double)strlen(text) : 0;
}

static void walk_value(const hetpipe_value *value)
{
    uint32_t i;
    if (value->kind == HETPIPE_LIST)
        for (i = 0; i < value->count; i++)
            walk_value(&value->of.items[i]);
    else if (value->kind == HETPIPE_TEXT)
        walk_text(value->of.text);
    else if (value->kind == HETPIPE_NUMBER)
        sum += value->of.number;
    else if (value->kind == HETPIPE_TENSOR)
        sum += value->of.node;
    else if (value->kind != HETPIPE_NONE)
        sum += (double)value->of.integer;
}

static void walk_node(const hetpipe_graph *graph, const hetpipe_node *node)
{
    uint32_t i;
    walk_text(node->name);
    walk_text(node->layer);
    walk_text(node->target);
    for (i = 0; i < node->args + node->kwargs; i++)
        walk_value(&node->values[i]);
    for (i = 0; i < node->kwargs; i++)
        walk_text(node->names[i]);
    for (i = 0; i < node->results; i++)
        sum += (double)hetpipe_elements(&node->forms[i]) *
               (double)hetpipe_dtype_nbytes(node->forms[i].dtype);
    for (i = 0; i < node->outputs; i++)
        sum += (double)hetpipe_elements(&graph->node[node->output[i]].forms[0]);
}

int main(void)
{
    unsigned char head[4];
    while (fread(head, 1, 4, stdin) == 4) {
        size_t nbytes = head[0] | (size_t)head[1] << 8 | (size_t)head[2] << 16 | (size_t)head[3] << 24;
        unsigned char *data = malloc(nbytes ? nbytes : 1);
        char error[256] = "";
        hetpipe_graph *graph;
        uint32_t i;
        if (!data || fread(data, 1, nbytes, stdin) != nbytes)
            return 1;
        graph = hetpipe_graph_read(data, nbytes, error, sizeof error);
        free(data); /* it is not needed any more */
        for (i = 0; graph && i < graph->nodes; i++)
            walk_node(graph, &graph->node[i]);
        puts(graph ? "taken" : error);
        fflush(stdout);
        hetpipe_graph_free(graph);
    }
    return sum == -1.0;
}
